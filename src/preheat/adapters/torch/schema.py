"""The schema of an operator of torch: what a kernel can implement, and the arguments of a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from preheat.errors import InputError, short_repr

__all__ = ["Argument", "Schema"]

_EXAMPLE = 'a schema has the form "my::scale(Tensor x, float a) -> Tensor"'
# The types of arguments that a launch takes as they are.
_PLAIN = ("Tensor", "Optional[Tensor]", "int", "float", "bool")


class Argument(NamedTuple):
    """An argument of an operator. `default` is a tuple with the default value, if there is one."""

    name: str
    type: str
    mutated: bool = False
    keyword: bool = False
    default: tuple[object, ...] = ()


class Schema(NamedTuple):
    """A parsed schema. `name` is `namespace::operator`, and `returns` is the number of tensors."""

    text: str
    name: str
    arguments: tuple[Argument, ...]
    returns: int

    @classmethod
    def parse(cls, text: object) -> Schema:
        """Return the schema that `text` describes.

        Raises `InputError` if it is not a schema, or not one that a kernel can implement.
        """
        parsed = _parse(text)
        arguments = tuple(
            Argument(
                each.name,
                str(each.type),
                each.alias_info is not None and each.alias_info.is_write,
                each.kwarg_only,
                (each.default_value,) if each.has_default_value() else (),
            )
            for each in parsed.arguments
        )
        schema = cls(str(text).strip(), parsed.name, arguments, len(parsed.returns))
        schema._check(parsed)
        return schema

    @property
    def signature(self) -> str:
        """The schema without the name."""
        return self.text[self.text.index("(") :]

    @property
    def mutated(self) -> tuple[str, ...]:
        """The names of the arguments that the operator writes to."""
        return tuple(each.name for each in self.arguments if each.mutated)

    def bind(self, given: Sequence[object], named: Mapping[str, object]) -> tuple[Any, ...]:
        """Return the values of all arguments of a call, in the order of the schema.

        torch has checked the call, and leaves out arguments that have their default values.
        """
        rest = [
            named[each.name] if each.name in named else each.default[0]
            for each in self.arguments[len(given) :]
        ]
        return (*given, *rest)

    def plain_arguments(self) -> None:
        """Raise `InputError` unless a launch takes every argument as it is."""
        for each in self.arguments:
            if each.type not in _PLAIN:
                raise self.error(
                    f"argument {each.name} is {each.type}, which a kernel does not take",
                    "name the arguments of the kernel: args=lambda x, …: (x, …)",
                )

    def error(self, problem: str, hint: str | None = None) -> InputError:
        """Return the error for a problem of this operator."""
        return InputError(f"{self.name}: {problem}", hint=hint)

    def _check(self, parsed: Any) -> None:
        namespace, _, _ = self.name.rpartition("::")
        if not namespace:
            raise self.error("the name has no namespace", f"choose one: my::{self.name}")
        if parsed.overload_name:
            raise self.error(f"the overload name {parsed.overload_name!r} is not supported")
        self._check_arguments()
        for each in parsed.returns:
            if str(each.type) != "Tensor":
                raise self.error(f"it returns {each.type}, and a kernel can return only tensors")
            if each.alias_info is not None:
                raise self.error(
                    "it returns one of its arguments", "let it return (), and use the argument"
                )
        if not self.returns and not self.mutated:
            raise self.error(
                "it returns nothing and writes to no argument",
                "mark what the kernel writes to: Tensor(a!) x",
            )

    def _check_arguments(self) -> None:
        names = [each.name for each in self.arguments]
        for name in names:
            if names.count(name) > 1:
                raise self.error(f"two arguments are called {name!r}")
        tensors = [each for each in self.arguments if "Tensor" in each.type]
        if all(each.type != "Tensor" for each in tensors):
            raise self.error("it has no Tensor argument, whose device would be that of the kernel")
        for each in tensors:
            if each.keyword:
                raise self.error(
                    f"tensor {each.name} can be given only by name", "move it before the *"
                )


def _parse(text: object) -> Any:
    import torch

    if not isinstance(text, str):
        raise InputError(f"a schema is text, not {short_repr(text)}", hint=_EXAMPLE)
    try:
        return torch._C.parse_schema(text)
    except RuntimeError as error:
        raise InputError(f"{text!r} is not a schema: {_reason(error)}", hint=_EXAMPLE) from None


def _reason(error: RuntimeError) -> str:
    """Return what torch's parser says, without the position, which the hint replaces."""
    lines = [line.strip() for line in str(error).splitlines()]
    first = next((line for line in lines if line), "torch gives no reason")
    return first.partition(". Common")[0].removesuffix(":").removesuffix(" here")
