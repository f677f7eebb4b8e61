import pytest
import torch
from torch.utils import _pytree as pytree

from fedpipe.core.tensors import NamesDifferError, Tensors


@pytest.fixture
def a():
    return Tensors(w=torch.tensor([[1.0, -2.0], [3.0, 4.0]]), b=torch.tensor([0.5]))


@pytest.fixture
def b():
    return Tensors(w=torch.tensor([[2.0, 2.0], [-1.0, 8.0]]), b=torch.tensor([4.0]))


def to_lists(tensors):
    assert type(tensors) is Tensors
    return {name: value.tolist() for name, value in tensors.items()}


def test_tensors_arithmetic_combines_values_with_equal_names(a, b):
    assert to_lists(a + b) == {"w": [[3, 0], [2, 12]], "b": [4.5]}
    assert to_lists(a - b) == {"w": [[-1, -4], [4, -4]], "b": [-3.5]}
    assert to_lists(a * b) == {"w": [[2, -4], [-3, 32]], "b": [2]}
    assert to_lists(a / b) == {"w": [[0.5, -1], [-3, 0.5]], "b": [0.125]}


def test_tensors_arithmetic_broadcasts_numbers_and_scalars(a):
    assert to_lists(a + 1) == {"w": [[2, -1], [4, 5]], "b": [1.5]}
    assert to_lists(a - 1) == {"w": [[0, -3], [2, 3]], "b": [-0.5]}
    assert to_lists(a * torch.tensor(2.0)) == to_lists(2 * a) == {"w": [[2, -4], [6, 8]], "b": [1]}
    assert to_lists(a / 2) == {"w": [[0.5, -1], [1.5, 2]], "b": [0.25]}
    assert to_lists(-a) == {"w": [[-1, 2], [-3, -4]], "b": [-0.5]}


def test_tensors_operations_keep_operands_unchanged(a, b):
    values = to_lists(a), to_lists(b)
    _ = a + b, a * 2, -a, a | b, a.zeros(), a.map(torch.exp)
    assert (to_lists(a), to_lists(b)) == values


@pytest.mark.parametrize("operation", ["__add__", "__sub__", "__mul__", "__truediv__", "add"])
def test_tensors_arithmetic_rejects_different_names(a, operation):
    with pytest.raises(NamesDifferError, match=r"names differ: \['b', 'c'\]"):
        getattr(a, operation)(Tensors(w=a["w"], c=a["b"]), **{"alpha": 2} if operation == "add" else {})


def test_tensors_arithmetic_ignores_order_of_names(a, b):
    swapped = Tensors(b=b["b"], w=b["w"])
    assert to_lists(a + swapped) == to_lists(a + b)
    assert list(a + swapped) == ["w", "b"]


def test_tensors_union_prefers_right_operand(a):
    union = a | {"b": torch.tensor([9.0]), "c": torch.tensor([1.0])}
    assert to_lists(union) == {"w": [[1, -2], [3, 4]], "b": [9], "c": [1]}
    assert list(union) == ["w", "b", "c"]


def test_tensors_only_selects_in_given_order(a):
    assert list(a.only(["b", "w"])) == ["b", "w"]
    assert to_lists(a.only(["b"])) == {"b": [0.5]}
    with pytest.raises(KeyError):
        a.only(["c"])


def test_tensors_zeros_and_ones_keep_shapes(a):
    assert to_lists(a.zeros()) == {"w": [[0, 0], [0, 0]], "b": [0]}
    assert to_lists(a.ones()) == {"w": [[1, 1], [1, 1]], "b": [1]}


def test_tensors_dot_norm_and_flat_equal_exact_values(a, b):
    assert a.dot(b).item() == 2 - 4 - 3 + 32 + 2
    assert a.square_norm().item() == 1 + 4 + 9 + 16 + 0.25
    assert a.norm().item() == pytest.approx(30.25**0.5)
    assert a.flat().tolist() == [1, -2, 3, 4, 0.5]


def test_tensors_unflat_inverts_flat(a):
    assert to_lists(a.zeros().unflat(a.flat())) == to_lists(a)
    with pytest.raises(RuntimeError):
        a.unflat(a.flat()[:-1])


def test_tensors_add_multiplies_by_alpha(a, b):
    assert to_lists(a.add(b, alpha=-2)) == to_lists(a - 2 * b)


def test_tensors_norm_gradient_at_zero_is_zero():
    zero = Tensors(w=torch.zeros(2, requires_grad=True), b=torch.zeros(1, requires_grad=True))
    gradient = torch.autograd.grad(zero.norm(), list(zero.values()))
    assert [part.tolist() for part in gradient] == [[0, 0], [0]]


def test_tensors_are_a_pytree(a):
    mapped = pytree.tree_map(lambda value: value + 1, {"model": a})["model"]
    assert to_lists(mapped) == to_lists(a + 1)


def test_tensors_work_with_grad_and_vmap(a):
    gradient = torch.func.grad(lambda tensors: tensors.square_norm())(a)
    assert to_lists(gradient) == to_lists(2 * a)
    stacked = a.map(lambda value: torch.stack([value, 2 * value]))
    assert torch.func.vmap(Tensors.square_norm)(stacked).tolist() == [30.25, 121]
