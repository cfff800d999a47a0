"""A table that does not keep its objects alive."""

from __future__ import annotations

import gc

from preheat.process.weak_values import WeakValues


class Thing:
    """An object that weak references can refer to."""


def test_an_object_is_found_until_nothing_holds_it() -> None:
    table: WeakValues[str, Thing] = WeakValues()
    thing = table["a"] = Thing()
    assert table.get("a") is thing
    assert "a" in table
    assert len(table) == 1
    assert list(table.values()) == [thing]
    del thing
    assert table.get("a") is None
    assert "a" not in table
    assert len(table) == 0
    assert not table._references, "the reference is gone as well"


def test_the_end_of_an_object_does_not_remove_the_one_that_replaced_it() -> None:
    table: WeakValues[str, Thing] = WeakValues()
    first = table["a"] = Thing()
    second = table["a"] = Thing()
    del first
    gc.collect()
    assert table.get("a") is second


def test_an_object_that_ends_in_a_cycle_does_not_remove_the_one_that_replaced_it() -> None:
    """Its reference is called after the later object was entered, by the garbage collector."""
    table: WeakValues[str, Thing] = WeakValues()
    gc.disable()
    try:
        first = table["a"] = Thing()
        first.__dict__["itself"] = first
        reference = table._references["a"]
        del first
        second = table["a"] = Thing()
        gc.collect()
    finally:
        gc.enable()
    assert reference() is None
    assert table.get("a") is second


def test_objects_can_be_removed() -> None:
    table: WeakValues[str, Thing] = WeakValues()
    things = [Thing(), Thing()]
    table["a"], table["b"] = things
    table.pop("a")
    table.pop("a")
    assert list(table.values()) == things[1:]
    table.clear()
    assert len(table) == 0
