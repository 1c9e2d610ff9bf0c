"""Headers of draft heads of all families, and their descriptions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import ClassVar, NoReturn

from edgespec.errors import ModelFileError, PairingError
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.gguf.types import GGUFHeader, as_count


class Head(ABC):
    """A draft head, as its header describes it.

    Attributes:
        role: what it is, in a word for people.
        beside_target: whether its context is set up beside its target's, whose matrices it may borrow. If
            not, its file holds layers of the target.
        keeps_cells: whether its context has cells of its own.
    """

    role: ClassVar[str]
    beside_target: ClassVar[bool] = True
    keeps_cells: ClassVar[bool] = True

    @property
    @abstractmethod
    def shown_width(self) -> int:
        """Elements of what the target shows of each token."""

    @abstractmethod
    def require_fit(self, target: ModelFiles) -> None:
        """Make sure that the head was made for a model like this target.

        The vocabularies' tokens are compared when both are loaded.

        Raises:
            PairingError: it was not.
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
