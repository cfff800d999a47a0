"""Valid and invalid sizes of a block, with errors that name the parameters."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from preheat import InputError
from preheat.kernels import elementwise
from preheat.lora import MODELS, backward_plan
from tests.lora.block import GQA, names

LARGE = 2**30
REFUSED: list[tuple[dict[str, Any], str]] = [
    *(({name: 0}, f"{name} 0 is outside 1 to") for name in ("hidden", "heads", "max_seq")),
    *(({name: -4}, f"{name} -4 is outside 1 to") for name in ("q_dim", "kv_dim", "intermediate")),
    *(({name: 2**31}, f"{name} 2147483648 is outside") for name in ("hidden", "q_dim", "max_seq")),
    ({"hidden": 1.5}, "hidden 1.5 is not an integer"),
    ({"lora_rank": -1}, "lora_rank -1 is outside 0 to 6"),
    ({"lora_rank": 7}, "lora_rank 7 is outside 0 to 6"),
    *(
        ({"lora_rank": rank}, f"lora_rank {rank!r} is not an integer")
        for rank in ("x", 0.0, False, np.zeros(2))
    ),
    *(
        ({name: flag}, f"{name} {flag!r} is not True or False")
        for name in ("frozen", "nf4")
        for flag in ("no", 2, 0, None)
    ),
    ({"heads": 5}, "heads 5 does not divide q_dim 12"),
    ({"kv_dim": 4}, "kv_dim 4 is not a multiple of the size of a head, 3"),
    ({"kv_dim": 9}, "kv_dim 9 gives 3 heads of keys and values, and heads 4 is not a multiple of that"),
    ({"kv_dim": 24}, "kv_dim 24 gives 8 heads of keys and values"),
    ({"max_seq": LARGE}, f"heads 4 by max_seq {LARGE} is {4 * LARGE}, which is more than"),
    ({"max_seq": 2**20}, f"heads 4 by max_seq {2**20} by max_seq {2**20} is"),
    ({"hidden": LARGE, "max_seq": 1025}, f"max_seq 1025 by hidden {LARGE} is"),
    ({"intermediate": LARGE, "hidden": 1025}, f"hidden 1025 by intermediate {LARGE} is"),
    (
        {"intermediate": LARGE, "max_seq": 1024},
        f"max_seq 1024 by intermediate {LARGE} is {2**40}, "
        f"which is more than {elementwise.MAX_ELEMENTS}",
    ),
    ({"dtype": "float64"}, "do not take float64"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=lambda v: str(v)[:40])
def test_dimensions_that_cannot_be_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        backward_plan(**asdict(GQA) | change)
    assert "lora_rank" not in change or "0 means no LoRA" in (caught.value.hint or "")


def test_numbers_and_types_of_numpy_make_the_same_plan() -> None:
    sizes = {name: np.int32(size) for name, size in MODELS["llama-3-8b"].sizes.items()}
    more: dict[str, Any] = {"max_seq": np.int32(2**17), "lora_rank": np.int8(0)}
    plan = backward_plan(**sizes, **more, nf4=np.True_, dtype=np.float16)  # type: ignore[arg-type]
    real: dict[str, Any] = MODELS["llama-3-8b"].sizes
    wanted = backward_plan(**real, max_seq=2**17, lora_rank=0, nf4=True, dtype="float16")
    assert plan == wanted
    assert plan.operations == wanted.operations
    assert json.dumps(asdict(plan.shape)) == json.dumps(asdict(wanted.shape))


def test_the_largest_possible_shape_is_planned() -> None:
    plan = backward_plan(**asdict(GQA) | {"max_seq": 2**19 - 1, "hidden": 2**21, "lora_rank": 6})
    assert f"softmax_backward(rows={2**21 - 4}, width={2**19 - 1})" in names(plan)


def test_the_largest_activation_is_one_that_its_kernel_takes() -> None:
    seq = 1031
    inner = elementwise.MAX_ELEMENTS // seq
    assert seq * (inner + 1) > elementwise.MAX_ELEMENTS
    plan = backward_plan(**asdict(GQA) | {"max_seq": seq, "intermediate": inner})
    assert f"swiglu_backward(n={seq * inner})" in names(plan)
    with pytest.raises(InputError, match=f"max_seq {seq} by intermediate {inner + 1} is"):
        backward_plan(**asdict(GQA) | {"max_seq": seq, "intermediate": inner + 1})
