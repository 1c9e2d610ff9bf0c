"""Long texts without a break, through every pre-tokenizer and kind of vocabulary that llama.cpp has.

    python -m tests.long_runs --chars 100000 1000000
    python -m tests.long_runs --only qwen2 llama-bpe

Most pre-tokenizers split texts by std::regex, which recurses for every character. A process of its own
tokenizes each text on its main thread, whose stack has the usual 8 MiB. The tokens must spell the text, or it
must be refused with a message; a death, another text, or too much processor time ends the run with status 1.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tests.fuzz.headers import ARRAY, Entry, Header, small_model

if TYPE_CHECKING:
    from edgespec.models.llama.tokenizer.vocabulary import Vocabulary

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
_MOST_S = 120  # of processor time, a text


def pre_tokenizers() -> list[str]:
    """The names that llama.cpp knows: it is asked about every word in its library."""
    import llama_cpp

    library = next((Path(llama_cpp.__file__).parent / "lib").glob("*llama.*")).read_bytes()
    words = set(re.findall(rb"(?<=\0)[A-Za-z0-9][A-Za-z0-9_.-]{1,24}(?=\0)", library))
    return sorted(word.decode() for word in words if not refusal(byte_pair(word.decode())))


def byte_pair(words: str) -> Header:
    """A byte-pair vocabulary with this pre-tokenizer, and no weights."""
    header = _vocabulary()
    header.change("tokenizer.ggml.pre", words.encode())
    return header


def of_kind(kind: str) -> Header:
    """A vocabulary of another kind, whose tokens are bytes and letters."""
    header = _vocabulary()
    header.change("tokenizer.ggml.model", kind.encode())
    if kind == "gemma4":
        return header
    drop = (b"tokenizer.ggml.pre", b"tokenizer.ggml.merges", b"tokenizer.ggml.token_type")
    header.entries = [entry for entry in header.entries if entry.key not in drop]
    special = [b"<unk>", b"<s>", b"</s>", b"[UNK]", b"[CLS]", b"[SEP]", b"[PAD]", b"[MASK]"]
    pieces = [b"<0x%02X>" % byte for byte in range(256)]
    pieces += [letter.encode() for letter in "abcdefghij▁AB七7 !λя"] + [b"aa", b"ab"]
    tokens = special + pieces
    kinds = [2, 3, 3, *([3] * 5), *([6] * 256), *([1] * (len(pieces) - 256))]
    header.change("tokenizer.ggml.tokens", tokens)
    header.entries.append(Entry(b"tokenizer.ggml.scores", ARRAY, [-float(n) for n in range(len(tokens))], 6))
    header.entries.append(Entry(b"tokenizer.ggml.token_type", ARRAY, kinds, 5))
    return header


def _vocabulary() -> Header:
    from edgespec.models.hub import catalog

    header = small_model(catalog.find(None), layers=1)
    header.entries = [entry for entry in header.entries if entry.key != b"tokenizer.chat_template"]
    tokens = set(header.entries[header.index("tokenizer.ggml.tokens")].value)
    merges = header.entries[header.index("tokenizer.ggml.merges")].value
    header.change("tokenizer.ggml.merges", [m for m in merges if m.replace(b" ", b"") in tokens])
    return header


def refusal(header: Header) -> str:
    """Why a file's vocabulary cannot be loaded, found out in a fork; empty if it can."""
    return outcomes(header, {"": ""})[""]


def outcomes(header: Header, texts: Mapping[str, str]) -> dict[str, str]:
    """What becomes of texts: nothing of those that tokens spell, and otherwise what went wrong.

    A fork tokenizes one after another; if it dies, that is what became of the text, and another one does the
    rest.
    """
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        path.write_bytes(header.to_bytes())
        while left := {name: text for name, text in texts.items() if name not in found}:
            read, write = os.pipe()
            child = os.fork()
            if not child:
                _answer(path, left, write)
            os.close(write)
            with os.fdopen(read, encoding="utf-8", errors="replace") as answers:
                found |= dict(zip(left, answers.read().splitlines(), strict=False))
            _, status = os.waitpid(child, 0)
            if os.WIFSIGNALED(status):
                died_at = next(name for name in left if name not in found)
                found[died_at] = signal.Signals(os.WTERMSIG(status)).name
    return found


def _answer(path: Path, texts: Mapping[str, str], out: int) -> None:
    """The fork's part: a line for each text."""
    from edgespec.errors import EdgeSpecError
    from edgespec.models.llama.runtime.model import Model

    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for text in texts.values():
        used = resource.getrusage(resource.RUSAGE_SELF)
        seconds = int(used.ru_utime + used.ru_stime) + _MOST_S
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
        try:
            with Model(path, vocabulary_only=True, vetted=False) as model:
                said = _spelled(model.vocabulary, text)
        except EdgeSpecError as error:
            said = f"refused: {error.what}"
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        os.write(out, f"{' '.join(said.split())[:300]}\n".encode())
    os._exit(0)


def _spelled(vocabulary: Vocabulary, text: str) -> str:
    """Tokenize a text, and say if its tokens are those of another one."""
    tokens = vocabulary.tokenize(text, control=False)
    if vocabulary.kind != _BYTE_PAIR:  # those have no tokens for some characters
        return ""
    same = b"".join(map(vocabulary.piece, tokens)) == text.encode()
    return "" if same else f"other text, of {len(tokens)} tokens"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chars", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--only", nargs="+", help="names of pre-tokenizers or kinds of vocabularies")
    options = parser.parse_args()
    from edgespec.models.llama.runtime.backend import start_backend

    os.environ["GGML_NO_BACKTRACE"] = "1"
    start_backend()
    known = options.only or [*pre_tokenizers(), *_KINDS]
    print(f"{len(known)} pre-tokenizers and kinds of vocabularies", flush=True)
    failed = tried = refused = 0
    slowest = (0.0, "")
    for name in known:
        header = of_kind(name) if name in _KINDS else byte_pair(name)
        if why := refusal(header):
            print(f"{name}: not made: {why[:160]}", flush=True)
            continue
        for chars in options.chars:
            texts = {what: (part * (chars // len(part) + 1))[:chars] for what, part in TEXTS.items()}
            start = time.perf_counter()
            for what, said in outcomes(header, texts).items():
                tried += 1
                refused += said.startswith("refused")
                if said and not said.startswith("refused"):
                    failed += 1
                    print(f"{name}: {chars} characters of {what}: {said}", flush=True)
            slowest = max(slowest, (time.perf_counter() - start, f"{name}, {chars} characters"))
    print(f"{tried} texts: {refused} refused, {failed} failed; {slowest[0]:.0f} s for {slowest[1]}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
