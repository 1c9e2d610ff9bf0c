"""Long texts without a break, through every pre-tokenizer and kind of vocabulary that llama.cpp has.

    python -m tests.long_runs --chars 100000 1000000
    python -m tests.long_runs --only qwen2 llama-bpe
    python -m tests.long_runs --minutes 30 --results results.json    # continues where it stopped

Most pre-tokenizers split texts by std::regex, which recurses for every character. A process of its own
tokenizes each text on its main thread, whose stack has the usual 8 MiB. The tokens must spell the text, or it
must be refused with a message; a death, another text, or too much processor time ends the run with status 1.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from edgespec.files.writing import atomic_write
from tests.fuzz.headers import ARRAY, Entry, Header, small_model

TEXTS = {
    "a letter": "a",
    "letters": "abcdefghij",
    "capitals": "A",
    "mixed case": "aB",
    "Cyrillic": "я",
    "Greek and Han": "λ漢",
    "kana": "ひらがなカタカナ",
    "Thai": "ไทย",
    "Hindi": "हिन्दी",
    "Arabic": "مرحبا",
    "combining accents": "e\u0301",
    "emoji": "👩‍👩‍👧‍👦",
    "digits": "7",
    "spaces": " ",
    "tabs and breaks": "\t\n",
    "line breaks": "\r\n",
    "no-break spaces": "\u00a0",
    "punctuation": "!",
    "quotes": "'s",
    "code": "x=(x);",
    "underscores": "_a",
    "letters and digits": "a1",
    "zero-width": "\u200b",
    "words": "a ",
}
# Vocabularies that are not byte-pair: their kind, as llama.cpp calls it in files.
_KINDS = ("llama", "bert", "t5", "rwkv", "plamo2", "whitespace", "gemma4", "hybriddna")
_BYTE_PAIR = 2  # llama.cpp's number for this kind
_OTHER_TEXT = "other text"
_MAX_S = 120  # of processor time, a text


def pre_tokenizers() -> list[str]:
    """The names that llama.cpp knows: it is asked about every word in its library."""
    import llama_cpp

    library = next((Path(llama_cpp.__file__).parent / "lib").glob("*llama.*")).read_bytes()
    words = set(re.findall(rb"(?<=\0)[A-Za-z0-9][A-Za-z0-9_.-]{1,24}(?=\0)", library))
    names = sorted(word.decode() for word in words)
    found = in_forks(names, lambda name, path: _spelled(byte_pair(name), "", path))
    return [name for name in names if not found[name]]


def byte_pair(words: str) -> Header:
    """A byte-pair vocabulary with this pre-tokenizer, and no weights."""
    header = _vocabulary().copy()
    header.change("tokenizer.ggml.pre", words.encode())
    return header


def of_kind(kind: str) -> Header:
    """A vocabulary of another kind, whose tokens are bytes and letters."""
    header = _vocabulary().copy()
    header.change("tokenizer.ggml.model", kind.encode())
    if kind == "gemma4":
        return header
    drop = (b"tokenizer.ggml.pre", b"tokenizer.ggml.merges", b"tokenizer.ggml.token_type")
    header.entries = [entry for entry in header.entries if entry.key not in drop]
    special = [b"<unk>", b"<s>", b"</s>", b"[UNK]", b"[CLS]", b"[SEP]", b"[PAD]", b"[MASK]"]
    spelled = b"\\x%02x" if kind == "rwkv" else b"<0x%02X>"  # how a token says that it is a byte
    pieces = [spelled % byte for byte in range(256)]
    pieces += [letter.encode() for letter in "abcdefghij▁AB七7 !λя"] + [b"aa", b"ab"]
    tokens = special + pieces
    kinds = [2, 3, 3, *([3] * 5), *([6] * 256), *([1] * (len(pieces) - 256))]
    header.change("tokenizer.ggml.tokens", tokens)
    header.entries.append(Entry(b"tokenizer.ggml.scores", ARRAY, [-float(n) for n in range(len(tokens))], 6))
    header.entries.append(Entry(b"tokenizer.ggml.token_type", ARRAY, kinds, 5))
    return header


@cache
def _vocabulary() -> Header:
    from edgespec.models.hub import catalog

    header = small_model(catalog.find(None), layers=1)
    header.entries = [entry for entry in header.entries if entry.key != b"tokenizer.chat_template"]
    tokens = set(header.entries[header.index("tokenizer.ggml.tokens")].value)
    merges = header.entries[header.index("tokenizer.ggml.merges")].value
    header.change("tokenizer.ggml.merges", [m for m in merges if m.replace(b" ", b"") in tokens])
    return header


def in_forks(items: Iterable[str], answer: Callable[[str, Path], str]) -> dict[str, str]:
    """Results of `answer` for each item, or how it ended the process.

    A fork does one item after another; if it dies, that is what became of the item, and another one does the
    rest.

    Args:
        answer: is given an item and a file that it may write.
    """
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        while left := [item for item in items if item not in found]:
            read, write = os.pipe()
            child = os.fork()
            if not child:
                _answer_all(left, answer, Path(folder) / "model.gguf", write)
            os.close(write)
            with os.fdopen(read, encoding="utf-8", errors="replace") as answers:
                found |= dict(zip(left, answers.read().splitlines(), strict=False))
            _, status = os.waitpid(child, 0)
            if os.WIFSIGNALED(status):
                died_at = next(item for item in left if item not in found)
                found[died_at] = signal.Signals(os.WTERMSIG(status)).name
    return found


def _answer_all(items: Iterable[str], answer: Callable[[str, Path], str], path: Path, out: int) -> None:
    """The fork's part: a line for each item."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for item in items:
        used = resource.getrusage(resource.RUSAGE_SELF)
        seconds = int(used.ru_utime + used.ru_stime) + _MAX_S
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
        try:
            said = answer(item, path)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        os.write(out, f"{' '.join(said.split())[:300]}\n".encode())
    os._exit(0)


def _spelled(header: Header, text: str, path: Path) -> str:
    """Tokenize a text with this vocabulary: why that is impossible, or that the tokens spell another text."""
    from edgespec.errors import EdgeSpecError
    from edgespec.llama.runtime.model import Model

    path.write_bytes(header.to_bytes())
    try:
        with Model(path, vocabulary_only=True, vetted=False) as model:
            tokens = model.vocabulary.tokenize(text, control=False)
            if model.vocabulary.kind != _BYTE_PAIR:  # the others have no tokens for some characters
                return ""
            same = b"".join(map(model.vocabulary.piece, tokens)) == text.encode()
    except EdgeSpecError as error:
        return f"refused: {error.what}"
    return "" if same else f"{_OTHER_TEXT}, of {len(tokens)} tokens"


@dataclass
class _Sums:
    tried: int = 0
    refused: int = 0
    failed: int = 0
    slowest_s: float = 0.0
    slowest: str = ""


def _through(name: str, sizes: Iterable[int], sums: _Sums) -> str:
    """Put all texts through a pre-tokenizer or kind of vocabulary: in words, how that went."""
    header = of_kind(name) if name in _KINDS else byte_pair(name)
    if why := in_forks([""], lambda text, path: _spelled(header, text, path))[""]:
        return f"not made: {why[:160]}"
    start = time.perf_counter()
    for chars in sizes:
        texts = {what: (part * (chars // len(part) + 1))[:chars] for what, part in TEXTS.items()}

        def answer(what: str, path: Path, texts: Mapping[str, str] = texts) -> str:
            began = time.process_time()
            said = _spelled(header, texts[what], path)
            seconds = time.process_time() - began
            # Some pre-tokenizers do not write bytes as letters: these tokens cannot spell all texts then.
            if said.startswith(_OTHER_TEXT) and _spelled(header, TEXTS[what], path).startswith(_OTHER_TEXT):
                said = ""
            return f"{seconds:.1f} {said}"

        for what, said in in_forks(texts, answer).items():
            seconds, _, outcome = said.partition(" ") if said[0].isdigit() else ("0", "", said)
            sums.tried += 1
            sums.refused += outcome.startswith("refused")
            if float(seconds) > sums.slowest_s:
                sums.slowest_s, sums.slowest = float(seconds), f"{name}, {chars} characters of {what}"
            if outcome and not outcome.startswith("refused"):
                sums.failed += 1
                print(f"{name}: {chars} characters of {what}: {outcome}", flush=True)
    return f"{time.perf_counter() - start:.0f} s"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chars", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--only", nargs="+", help="names of pre-tokenizers or kinds of vocabularies")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no other after that")
    parser.add_argument("--results", type=Path, help="keep the results there, and do the others next time")
    options = parser.parse_args()
    from edgespec.llama.runtime.backend import start_backend

    os.environ["GGML_NO_BACKTRACE"] = "1"
    start_backend()
    known = options.only or [*pre_tokenizers(), *_KINDS]
    print(f"{len(known)} pre-tokenizers and kinds of vocabularies", flush=True)
    results: dict[str, str] = {}
    sums = _Sums()
    if options.results and options.results.exists():
        before = json.loads(options.results.read_text())
        results, sums = before["results"], _Sums(**before["sums"])
    deadline = time.monotonic() + 60 * options.minutes
    for name in known:
        if name in results or time.monotonic() > deadline:
            continue
        results[name] = _through(name, options.chars, sums)
        print(f"{len(results)} of {len(known)} {name}: {results[name]}", flush=True)
        if options.results:
            with atomic_write(options.results) as file:
                file.write(json.dumps({"results": results, "sums": asdict(sums)}).encode())
    print(
        f"{len(results)} of {len(known)}, {sums.tried} texts: {sums.refused} refused, {sums.failed} failed; "
        f"at most {sums.slowest_s:.1f} s of processor time, for {sums.slowest}"
    )
    return 1 if sums.failed else 0


if __name__ == "__main__":
    sys.exit(main())
