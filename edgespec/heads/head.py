"""Headers of draft heads of all families, and their descriptions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, NoReturn, TypedDict

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ModelFileError, PairingError
from edgespec.models.gguf.header_checks import D2T
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.gguf.types import ArrayInfo, GGUFHeader, as_count


class Head(ABC):
    """A draft head, as its header describes it."""

    role: ClassVar[str]  # what it is, in a word for people
    # whether its context is set up beside its target's, whose matrices it may borrow. If not, its file holds
    # layers of the target.
    beside_target: ClassVar[bool] = True
    keeps_cells: ClassVar[bool] = True  # whether its context has cells of its own

    @property
    @abstractmethod
    def shown_width(self) -> int:
        """Elements of what the target shows of each token."""

    @abstractmethod
    def require_fit(self, target: ModelFiles) -> None:
        """Make sure that the head was made for a model like this target.

        The vocabularies' tokens are compared when both are loaded.

        Raises:
            ModelFileError: its table of drafted tokens is damaged.
        """

    def multiplied(self, files: ModelFiles, target: ModelFiles) -> ModelFiles:
        """The weights that a draft step multiplies by.

        Args:
            files: the head's own.
        """
        del target
        return files


class HeadHeader:
    """Reads the header of a head, and refuses a damaged one.

    Args:
        noun: what the head is called.

    Attributes:
        tensors: by name.
    """

    def __init__(self, header: GGUFHeader, noun: str = "head") -> None:
        self.header = header
        self._noun = noun
        self.tensors = {tensor.name: tensor for tensor in header.tensors}

    def count(self, key: str) -> int:
        """A positive number in the metadata.

        Raises:
            ModelFileError: it is not there.
        """
        value = as_count(self.header.metadata.get(f"{self.header.architecture}.{key}"))
        if not value:
            self.refuse(f"it lacks its {key.replace('_', ' ')}")
        return value

    def require_shape(self, name: str, shape: tuple[int, int]) -> None:
        """Make sure that there is a tensor of a shape.

        Raises:
            ModelFileError: it has another one, or there is none of this name.
        """
        if name not in self.tensors:
            self.refuse(f"it has no tensor {name}")
        if (found := self.tensors[name].shape) != shape:
            self.refuse(f"its tensor {name} has the shape {list(found)} instead of {list(shape)}")

    def refuse(self, why: str) -> NoReturn:
        """Refuse the head.

        Raises:
            ModelFileError: always.
        """
        raise ModelFileError(
            f"The {self._noun} {self.header.path} cannot be used: {why}.",
            f"Get another conversion of the {self._noun}.",
        )


def with_output(files: ModelFiles, target: ModelFiles) -> ModelFiles:
    """The weights of a head that borrows its target's output, with this output."""
    tensors = {tensor.name: tensor for header in target.headers for tensor in header.tensors}
    output = tensors.get("output.weight") or tensors.get("token_embd.weight")
    if output is None:
        return files
    first, *others = files.headers
    # Under this name it is multiplied by, whatever else it is used for.
    output = replace(output, name="output.weight")
    return ModelFiles((replace(first, tensors=(*first.tensors, output)), *others))


def another_target(head: str, target: GGUFHeader, why: str, hint: str) -> PairingError:
    """The error for a head that was made for another target.

    Args:
        head: it, as the beginning of a sentence.
    """
    return PairingError(f"{head} was made for another target than {target.path.name}: {why}.", hint)


_I64 = 27
_HINT = "Name a head that was trained for this model, or an ordinary drafter."


@dataclass(frozen=True)
class LayerHead(Head):
    """The header of a head that reads the inputs of some layers.

    llama.cpp aborts over heads that do not fit, so what it would assert is checked here first.

    Attributes:
        layers: of the target, whose inputs the head reads. The first layer is 0, so each is also the number
            of layers that came before.
        target_width: elements of the target's hidden states.
        width: elements of the head's own, which are its features.
        n_drafted: tokens that it can draft.
        borrows_embedding, borrows_output: whether it uses the target's token embedding, its output matrix.
    """

    role = "head"

    header: GGUFHeader
    layers: tuple[int, ...]
    target_width: int
    width: int
    n_drafted: int
    borrows_embedding: bool
    borrows_output: bool

    @property
    def name(self) -> str:
        """The name of its file."""
        return self.header.path.name

    @property
    def shown_width(self) -> int:
        """Elements of the hidden states of a token, of all layers that are read."""
        return len(self.layers) * self.target_width

    def require_fit(self, target: ModelFiles) -> None:
        """Make sure that the head was made for a model like this target; see Head."""
        if why := self._misfit(target):
            raise another_target(f"The head {self.name}", target.headers[0], why, _HINT)
        # llama.cpp would write to the places that the table names.
        ids = drafted_tokens(self)
        if ids.min() < 0 or ids.max() >= self.header.n_vocab or len(np.unique(ids)) < len(ids):
            HeadHeader(self.header).refuse(
                "its table of drafted tokens (d2t) does not hold distinct token ids; in some files it holds "
                "offsets, which llama.cpp does not read"
            )

    def multiplied(self, files: ModelFiles, target: ModelFiles) -> ModelFiles:
        """The weights that a draft step multiplies by; see Head."""
        return with_output(files, target) if self.borrows_output else files

    def _misfit(self, target: ModelFiles) -> str:
        """The reason why it was not made for a model like this target; empty if it was."""
        header = target.headers[0]
        width, layers = header.embedding_length or 0, header.block_count or 0
        if self.target_width != width:
            return f"it reads hidden states of {self.target_width} elements, not {width}"
        if min(self.layers) < 1 or max(self.layers) >= layers:
            wanted = ", ".join(map(str, self.layers))
            return f"it reads the layers {wanted} (the first is 0), but there are {layers}"
        if header.n_vocab > self.header.n_vocab:
            return f"it knows {self.header.n_vocab} tokens, but the target has {header.n_vocab}"
        borrows = self.borrows_embedding or self.borrows_output
        if borrows and self.width != width:
            return f"it has no matrix for its {self.width} elements and borrows those of {width}"
        tensors = {tensor.name: tensor for part in target.headers for tensor in part.tensors}
        embedding = tensors.get("token_embd.weight")
        output = tensors.get("output.weight", embedding)
        rows = [matrix.shape[1] for matrix in (embedding, output) if matrix is not None]
        if borrows and (len(rows) < 2 or (self.borrows_output and rows[1] != self.n_drafted)):
            return "it borrows matrices that the target stores differently"
        return ""


class LayerHeadFields(TypedDict):
    """The fields of a LayerHead."""

    header: GGUFHeader
    layers: tuple[int, ...]
    target_width: int
    width: int
    n_drafted: int
    borrows_embedding: bool
    borrows_output: bool


def read_layers(head: HeadHeader) -> tuple[int, ...]:
    """The layers of its target that a head reads.

    Raises:
        ModelFileError: its header does not name them.
    """
    layers = head.header.metadata.get(f"{head.header.architecture}.target_layers")
    if not isinstance(layers, ArrayInfo) or not layers.values:
        head.refuse("it does not name the layers of its target that it reads")
    return layers.values


def read_fields(head: HeadHeader, layers: tuple[int, ...], target_width: int, width: int) -> LayerHeadFields:
    """Read the fields that the headers of all heads with layer taps have; see LayerHead.

    Raises:
        ModelFileError: the header lacks something, or contradicts itself.
    """
    header = head.header
    head.require_shape("fc.weight", (len(layers) * target_width, width))
    table, output = head.tensors.get(D2T), head.tensors.get("output.weight")
    n_drafted = table.shape[0] if table is not None else header.n_vocab
    if table is not None and (table.type_id != _I64 or output is None or n_drafted > header.n_vocab):
        head.refuse("its table of drafted tokens (d2t) is invalid")
    if output is not None:
        head.require_shape("output.weight", (width, n_drafted))
    borrows_embedding = "token_embd.weight" not in head.tensors
    if not borrows_embedding:
        head.require_shape("token_embd.weight", (width, header.n_vocab))
    return {
        "header": header,
        "layers": layers,
        "target_width": target_width,
        "width": width,
        "n_drafted": n_drafted,
        "borrows_embedding": borrows_embedding,
        "borrows_output": output is None,
    }


def drafted_tokens(head: LayerHead) -> NDArray[np.int64]:
    """(n_drafted,) the target's id of each token that the head drafts, in the order of its logits."""
    table = next((tensor for tensor in head.header.tensors if tensor.name == D2T), None)
    if table is None:
        return np.arange(head.n_drafted, dtype=np.int64)
    return np.fromfile(head.header.path, dtype="<i8", count=table.shape[0], offset=table.offset)
