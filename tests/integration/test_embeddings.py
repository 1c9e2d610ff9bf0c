"""Embeddings: as llama.cpp computes them, in the library, over HTTP and on the command line."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import ollama
import openai
import pytest

import edgespec
from edgespec.cli.main import main
from edgespec.engine.embedder import Embedder, normalized
from edgespec.errors import BackendError, ContextLengthError, MemoryLimitError, UsageError
from edgespec.serving.request_log import RequestLogEntry
from tests.serving import CHAT, RESPONSE, TEXT, Running, load, serving, serving_embeddings
from tests.tiny_embedders import CLS, CONTEXT, SEP, WIDTH, A, plain_embedding, write_bert, write_decoder
from tests.waiting import PATIENCE_S, wait_until

TEXTS = ["abc def", "x", "the one and the other", "a " * 20]
PATHS = ("/v1/embeddings", "/api/embed", "/api/embeddings", "/v1/rerank")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("embedders")


@pytest.fixture(scope="module")
def bert(folder: Path) -> Path:
    return write_bert(folder / "bert.gguf")


@pytest.fixture(scope="module")
def decoder(folder: Path, smol_path: Path) -> Path:
    return write_decoder(folder / "decoder.gguf", smol_path)


@pytest.fixture(scope="module")
def embedder(bert: Path) -> Iterator[Embedder]:
    with edgespec.load_embedder(bert, threads=1) as embedder:
        yield embedder


@pytest.fixture(scope="module")
def log() -> list[RequestLogEntry]:
    return []


@pytest.fixture(scope="module")
def server(bert: Path, log: list[RequestLogEntry]) -> Iterator[Running]:
    with serving_embeddings(
        lambda: edgespec.load_embedder(bert, threads=1), aliases=("text-*",), on_request=log.append
    ) as server:
        yield server


@pytest.fixture(scope="module")
def writer(short_path: Path) -> Iterator[Running]:
    """A server of a model that generates."""
    with serving(lambda: load(short_path)) as server:
        yield server


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with server.openai() as client:
        yield client


@pytest.fixture
def other_client(server: Running) -> Iterator[ollama.Client]:
    with server.ollama() as client:
        yield client


def same(found: object, expected: object) -> None:
    """Compare embeddings: kernels and passes round differently."""
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), atol=5e-3)


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_embeddings_are_those_of_llama_cpp_in_any_company(
    pooling: str, folder: Path, bert: Path, decoder: Path
) -> None:
    path = {"mean": bert, "last": decoder}.get(pooling)
    path = path or write_bert(folder / "cls.gguf", gguf.PoolingType.CLS)
    with edgespec.load_embedder(path, threads=1) as embedder:
        assert f"pooling {pooling}" in repr(embedder)
        tokens = [embedder.tokens(text) for text in TEXTS]
        expected = np.stack([plain_embedding(path, sequence) for sequence in tokens])
        raw = embedder.embed(TEXTS, normalize=False)
        same(raw / np.abs(expected).max(), expected / np.abs(expected).max())
        vectors = embedder.embed(TEXTS)
        same(vectors, normalized(expected))
        same(np.linalg.norm(vectors, axis=1), 1)
        same(embedder.embed(tokens), vectors)
        many = embedder.embed(TEXTS * 50)  # more than a pass holds
        same(many, np.tile(vectors, (50, 1)))
        assert len({tuple(vector) for vector in np.round(vectors, 2).tolist()}) == len(TEXTS)


def test_a_long_sequence_is_read_in_pieces_where_the_last_row_counts(decoder: Path) -> None:
    with edgespec.load_embedder(decoder, threads=1) as embedder:
        tokens = np.random.default_rng(5).integers(3, 1500, 300).tolist()
        same(embedder.embed([tokens])[0], normalized(plain_embedding(decoder, tokens)))


def test_cut_inputs_keep_the_tokens_of_both_ends(embedder: Embedder) -> None:
    assert embedder.tokens("a") == [CLS, A, SEP]
    tokens = embedder.tokens("a " * 500, truncate=True)
    assert tokens == [CLS, *[A] * (CONTEXT - 2), SEP]
    assert embedder.tokens([A] * 500, truncate=True) == [A] * CONTEXT
    with pytest.raises(ContextLengthError, match=f"502 tokens, and the maximum is {CONTEXT}"):
        embedder.tokens("a " * 500)


def test_dimensions_are_cut_and_normalized_again(embedder: Embedder) -> None:
    whole = embedder.embed(TEXTS, normalize=False)
    same(embedder.embed(TEXTS, dimensions=8), normalized(whole[:, :8]))
    for dimensions in (0, WIDTH + 1):
        with pytest.raises(UsageError, match=f"from 1 to {WIDTH}"):
            embedder.embed(TEXTS, dimensions=dimensions)


def test_what_cannot_be_embedded_is_refused(embedder: Embedder, short_path: Path, bert: Path) -> None:
    for inputs, reason in (([[]], "empty"), ([[10**6]], "no token 1000000"), ("text", "a list")):
        with pytest.raises(UsageError, match=reason):
            embedder.embed(inputs)  # type: ignore[arg-type]
    assert embedder.embed([]).shape == (0, WIDTH)
    with pytest.raises(UsageError, match="makes no embeddings"):
        edgespec.load_embedder(short_path)
    with pytest.raises(MemoryLimitError, match="not streamed from disk"):
        edgespec.load_embedder(bert, memory="50MiB")
    with edgespec.load_embedder(bert, threads=1) as closed:
        pass
    with pytest.raises(BackendError, match="closed"):
        closed.embed(TEXTS)


def test_the_openai_client_gets_embeddings(client: openai.OpenAI, embedder: Embedder) -> None:
    expected = embedder.embed(TEXTS)
    answer = client.embeddings.create(model="text-small", input=TEXTS)  # base64, unless asked otherwise
    same([one.embedding for one in answer.data], expected)
    assert [(one.index, one.object) for one in answer.data] == [(n, "embedding") for n in range(len(TEXTS))]
    assert (answer.object, answer.model) == ("list", "text-small")
    tokens = [embedder.tokens(text) for text in TEXTS]
    n_tokens = sum(map(len, tokens))
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (n_tokens, n_tokens)
    plain = client.embeddings.create(model="model", input=TEXTS, encoding_format="float")
    same([one.embedding for one in plain.data], expected)
    for given, n in ((TEXTS[0], 1), (tokens[0], 1), (tokens, len(tokens))):
        several = client.embeddings.create(model="model", input=given)
        same([one.embedding for one in several.data], expected[:n])
    short = client.embeddings.create(model="model", input=TEXTS, dimensions=8)
    same([one.embedding for one in short.data], embedder.embed(TEXTS, dimensions=8))


def test_base64_is_of_floats_in_little_endian(server: Running, embedder: Embedder) -> None:
    status, answer = server.post(PATHS[0], {"input": "abc", "encoding_format": "base64"})
    assert status == 200
    sent = np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), "<f4")
    same(sent, embedder.embed(["abc"])[0])


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"input": "a " * 500}, f"502 tokens, and the maximum is {CONTEXT}"),
        ({"input": ""}, "must be a non-empty string"),
        ({"input": ["a", ""]}, "must be a non-empty string"),
        ({}, 'Missing "input".'),
        ({"input": [1, "a"]}, "input must be"),
        ({"input": [10**6]}, "no token 1000000"),
        ({"input": "a", "dimensions": WIDTH + 1}, f"dimensions must be an integer from 1 to {WIDTH}"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format must be"),
        ({"input": ["a"] * 2049}, "2,049 inputs"),
        ([], "not a JSON object"),
    ],
)
def test_wrong_requests_are_refused(body: object, reason: str, server: Running) -> None:
    status, answer = server.post(PATHS[0], body)
    assert status == 400
    assert reason in answer["error"]["message"]


def test_the_ollama_client_gets_embeddings(other_client: ollama.Client, embedder: Embedder) -> None:
    answer = other_client.embed("model", TEXTS, keep_alive=-1, options={"num_ctx": 64})
    same(answer.embeddings, embedder.embed(TEXTS))
    assert answer.model == "model"
    assert answer.prompt_eval_count == sum(len(embedder.tokens(text)) for text in TEXTS)
    assert (answer.total_duration or 0) > 0
    same(other_client.embed("model", "x", dimensions=8).embeddings, embedder.embed(["x"], dimensions=8))
    assert len(other_client.embed("model", "x", dimensions=10**6).embeddings[0]) == WIDTH
    assert other_client.embed("model", "").embeddings == []
    long = "a " * 500
    cut = embedder.tokens(long, truncate=True)
    same(other_client.embed("model", long).embeddings, embedder.embed([cut]))
    with pytest.raises(ollama.ResponseError, match=f"the maximum is {CONTEXT}") as refused:
        other_client.embed("model", long, truncate=False)
    assert refused.value.status_code == 400


def test_the_older_path_does_not_normalize(other_client: ollama.Client, embedder: Embedder) -> None:
    answer = other_client.embeddings("model", TEXTS[0])
    expected = embedder.embed(TEXTS[:1], normalize=False)[0]
    same(np.array(answer.embedding) / np.abs(expected).max(), expected / np.abs(expected).max())
    assert other_client.embeddings("model", "").embedding == []


def test_models_are_listed_with_what_they_do(server: Running, other_client: ollama.Client) -> None:
    assert other_client.show("model").capabilities == ["embedding"]
    assert [model.model for model in other_client.list().models] == ["model"]
    assert [model["id"] for model in server.get("/v1/models")[1]["data"]] == ["model"]


def test_other_paths_of_an_embedding_model_name_those_that_it_has(server: Running) -> None:
    for path in (CHAT, TEXT, RESPONSE, "/v1/messages", "/api/chat", "/api/generate"):
        status, answer = server.post(path, {"model": "model", "messages": []})
        error = answer["error"]
        text = error if isinstance(error, str) else error["message"]
        assert status == 404
        assert text.startswith("model is an embedding model")
        assert "/v1/embeddings" in text


@pytest.mark.parametrize("path", PATHS)
def test_a_model_that_generates_says_that_it_makes_no_embeddings(path: str, writer: Running) -> None:
    status, answer = writer.post(path, {"model": "model", "input": "text"})
    error = answer["error"]
    text = error["message"] if path.startswith("/v1") else error
    assert status == 404
    assert text.startswith("model makes no embeddings.")
    assert "edgespec serve" in text


def test_requests_share_passes_and_are_logged(
    server: Running, log: list[RequestLogEntry], embedder: Embedder
) -> None:
    before, n = server.figures()["answered"], 8
    found: list[tuple[int, object]] = []

    def ask(text: str) -> None:
        status, answer = server.post(PATHS[0], {"input": [text] * 40})
        found.append((status, [one["embedding"] for one in answer["data"]]))

    threads = [threading.Thread(target=ask, args=(TEXTS[k % 4],)) for k in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert [status for status, _ in found] == [200] * n
    ours = np.repeat(embedder.embed(TEXTS), 2, axis=0)
    key = lambda vectors: float(np.asarray(vectors)[0])  # noqa: E731
    for (_, vectors), vector in zip(
        sorted(found, key=lambda one: key(one[1][0])),
        sorted(ours, key=key),
        strict=True,  # type: ignore[index]
    ):
        same(vectors, np.tile(vector, (40, 1)))
    wait_until(lambda: server.figures()["answered"] == before + n)
    assert log[-1].path == PATHS[0]


def test_a_client_that_leaves_is_forgotten(server: Running) -> None:
    before = server.figures().get("abandoned", 0)
    with server.connect() as client:
        client.send(PATHS[0], {"input": ["a " * 30] * 2048})
    wait_until(lambda: server.figures().get("abandoned", 0) == before + 1)
    assert server.post(PATHS[0], {"input": "a"})[0] == 200


@pytest.mark.parametrize("command", [["generate", "-p", "hi", "-m"], ["draft", "make"], ["profile"]])
def test_commands_that_generate_refuse_an_embedding_model(
    command: list[str], bert: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, str(bert)]) == 2
    assert "is an embedding model" in capsys.readouterr().err


def test_plan_and_show_describe_an_embedding_model(bert: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(bert)]) == 0
    out = capsys.readouterr().out
    assert f"{WIDTH} dimensions, pooling mean" in out
    assert f"at most {CONTEXT} tokens" in out
    assert main(["plan", str(bert), "--memory", "50MiB"]) == 1
    assert "not streamed from disk" in capsys.readouterr().err
    assert main(["models", "show", str(bert)]) == 0
    assert "pooling mean; the model writes no text" in capsys.readouterr().out


def test_encoders_without_embeddings_are_refused(tmp_path: Path) -> None:
    path = write_bert(tmp_path / "other.gguf", None)
    with pytest.raises(UsageError, match="states no pooling"):
        edgespec.load(path)
    with pytest.raises(UsageError, match="makes no embeddings"):
        edgespec.load_embedder(path)


def test_an_embedding_model_ranks_by_cosines(server: Running, embedder: Embedder) -> None:
    query, *documents = TEXTS
    body = {"query": query, "documents": [documents[0], {"text": documents[1]}, documents[2]]}
    status, answer = server.post(
        "/v1/rerank", {**body, "model": "text-1", "top_n": 2, "return_documents": True}
    )
    assert status == 200, answer
    vectors = embedder.embed(TEXTS)
    cosines = vectors[1:] @ vectors[0]
    best = np.argsort(-cosines)[:2].tolist()
    assert [one["index"] for one in answer["results"]] == best
    same([one["relevance_score"] for one in answer["results"]], cosines[best])
    assert [one["document"]["text"] for one in answer["results"]] == [documents[index] for index in best]
    assert answer["usage"]["total_tokens"] == sum(len(embedder.tokens(text)) for text in TEXTS)
    assert server.post("/rerank", {"query": query, "texts": documents})[0] == 200
    assert len(server.post("/v2/rerank", body)[1]["results"]) == 3
    for wrong in ({"query": query}, {"query": "", "documents": ["a"]}, {"query": "a", "documents": [""]}):
        assert server.post("/v1/rerank", wrong)[0] == 400


def test_a_reranker_scores_as_llama_cpp_does(tmp_path: Path) -> None:
    path = write_bert(tmp_path / "reranker.gguf", gguf.PoolingType.RANK)
    with pytest.raises(UsageError, match="is a reranker"):
        edgespec.load(path)
    query, *documents = TEXTS
    with edgespec.load_embedder(path, threads=1) as reranker:
        tokens = reranker.ranked_tokens(query, documents)
        assert reranker.ranked_tokens("a", ["a"]) == [[CLS, A, SEP, A, SEP]]
        expected = [plain_embedding(path, pair)[0] for pair in tokens]
        assert len(set(expected)) == len(expected)
        same(reranker.rank(query, documents), expected)
        same(reranker.rank(query, documents[::-1]), expected[::-1])
        with pytest.raises(UsageError, match="makes no embeddings"):
            reranker.embed(["a"])
        with pytest.raises(ContextLengthError):
            reranker.rank("a " * CONTEXT, ["a"])
    with serving_embeddings(lambda: edgespec.load_embedder(path, threads=1)) as server:
        status, answer = server.post("/v1/rerank", {"query": query, "documents": documents})
        assert status == 200, answer
        found = {one["index"]: one["relevance_score"] for one in answer["results"]}
        same([found[index] for index in range(len(documents))], expected)
        status, answer = server.post("/v1/embeddings", {"input": "a"})
        assert status == 400
        assert "Use /v1/rerank" in answer["error"]["message"]
