import pytest
import torch

from fedpipe.core.tensors import Tensors
from fedpipe.engine.torch_env.trees import is_finite


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("invalid_number", [float("inf"), float("-inf"), float("nan")])
def test_is_finite_detects_nonfinite_number_at_any_position(dtype, invalid_number):
    state = {"model": Tensors(w=torch.ones(3, 700, dtype=dtype), b=torch.zeros(0)), "count": torch.arange(4)}
    assert is_finite(state)
    for index in (0, 350, 2099):
        state["model"]["w"] = (
            torch.ones(2100, dtype=dtype).index_fill(0, torch.tensor(index), invalid_number).reshape(700, 3).T
        )
        assert not is_finite(state)


def test_is_finite_accepts_empty_state():
    assert is_finite({})
    assert is_finite({"model": Tensors(b=torch.zeros(0))})
