"""Which implementation runs is chosen by the call, then the environment, then the registry; nothing falls back in silence."""

import pytest
import torch

from thalweg.ops import dispatch, explain, topk

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two operations of three implementations and one, in a registry of their own."""
    monkeypatch.delenv("THALWEG_IMPLEMENTATION", raising=False)
    monkeypatch.setattr(dispatch, "_operations", {})
    monkeypatch.setattr(dispatch, "_calls", type(dispatch._calls)())
    only_cuda = {"cpu": "needs a CUDA device"}
    dispatch.register("double", "hopper", lambda x: x, lambda device: "needs sm_90")
    dispatch.register("double", "triton", lambda x: x + x, lambda device: only_cuda.get(device.type))
    dispatch.register("double", "reference", lambda x: 2 * x)
    dispatch.register("halve", "reference", lambda x: x / 2)


def chosen(operation: str, device: torch.device = CPU, forced: str | None = None) -> tuple[str, str]:
    implementation, why = dispatch.resolve(operation, device, forced)
    return implementation.name, why


@pytest.mark.usefixtures("registry")
def test_the_first_registered_that_the_device_supports_runs_and_says_why_the_others_do_not() -> None:
    name, why = chosen("double")
    assert name == "reference"
    assert "hopper" in why and "needs sm_90" in why and "triton" in why and "needs a CUDA device" in why
    name, why = chosen("double", CUDA)
    assert name == "triton" and "needs sm_90" in why and "CUDA device" not in why
    assert chosen("halve") == ("reference", "the only implementation")


@pytest.mark.usefixtures("registry")
def test_an_avoided_implementation_runs_only_where_it_is_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    avoided = {"cpu": "interpreted there"}
    dispatch.register("triple", "triton", lambda x: x + x + x, avoided=lambda device: avoided.get(device.type))
    dispatch.register("triple", "reference", lambda x: 3 * x)
    assert chosen("triple", CUDA)[0] == "triton"
    assert chosen("triple") == ("reference", "triton avoided: interpreted there")
    assert chosen("triple", CPU, "triton")[0] == "triton"
    monkeypatch.setenv("THALWEG_IMPLEMENTATION", "triple=triton")
    assert chosen("triple")[0] == "triton"


@pytest.mark.usefixtures("registry")
def test_a_call_may_force_one_and_what_is_impossible_names_the_reason() -> None:
    assert dispatch.run("double", "reference", CUDA, 4) == 8
    assert chosen("double", CUDA, "reference")[0] == "reference"
    with pytest.raises(ValueError, match=r"double.*triton.*cpu.*needs a CUDA device"):
        dispatch.run("double", "triton", CPU, 4)
    with pytest.raises(ValueError, match=r"double.*'tritn'.*hopper, triton, reference"):
        dispatch.run("double", "tritn", CPU, 4)


@pytest.mark.usefixtures("registry")
def test_the_environment_chooses_for_all_or_for_one_and_the_call_overrides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THALWEG_IMPLEMENTATION", "reference")
    assert chosen("double", CUDA)[0] == "reference" and "THALWEG_IMPLEMENTATION=reference" in chosen("double", CUDA)[1]
    assert chosen("double", CUDA, "triton")[0] == "triton"
    monkeypatch.setenv("THALWEG_IMPLEMENTATION", " double=reference , halve=reference")
    assert chosen("double", CUDA)[0] == "reference" and chosen("halve", CUDA)[0] == "reference"
    monkeypatch.setenv("THALWEG_IMPLEMENTATION", "")
    assert chosen("double", CUDA)[0] == "triton"


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("value", ["triton", "double=triton"])
def test_the_environment_cannot_force_what_the_device_lacks(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THALWEG_IMPLEMENTATION", value)
    with pytest.raises(ValueError, match=r"THALWEG_IMPLEMENTATION.*double.*needs a CUDA device"):
        chosen("double")


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(
    ("value", "possible"),
    [
        ("refrence", "hopper, reference, triton"),
        ("double=refrence", "hopper, triton, reference"),
        ("doubel=reference", "double, halve"),
        ("halve=triton", "reference"),
        ("double=reference,halv=reference", "double, halve"),
        ("double=", "hopper, triton, reference"),
        ("Reference", "hopper, reference, triton"),
    ],
)
def test_a_misspelt_variable_is_an_error_for_every_operation_and_names_what_there_is(
    value: str, possible: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THALWEG_IMPLEMENTATION", value)
    for operation in ("double", "halve"):
        with pytest.raises(ValueError, match=rf"THALWEG_IMPLEMENTATION={value}.*{possible}"):
            chosen(operation)


@pytest.mark.usefixtures("registry")
def test_an_operation_that_nothing_can_run_says_why() -> None:
    dispatch.register("hard", "hopper", lambda: None, lambda device: "needs sm_90")
    with pytest.raises(ValueError, match=r"hard cannot run on cpu: hopper cannot: needs sm_90"):
        chosen("hard")


@pytest.mark.usefixtures("registry")
def test_explain_lists_every_operation_with_its_choice_reason_and_calls() -> None:
    dispatch.run("double", None, CPU, 1)
    dispatch.run("double", None, CPU, 1)
    with pytest.raises(ValueError, match="triton"):
        dispatch.run("double", "triton", CPU, 1)
    double, halve = explain("cpu")
    assert (double.operation, double.device, double.implementation) == ("double", "cpu", "reference")
    assert "needs sm_90" in double.why and double.calls == {"reference": 2}
    assert (halve.operation, halve.calls) == ("halve", {})


def test_the_operations_of_the_library_obey_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, lengths = torch.tensor([[1.0, 2.0]]), torch.tensor([2])
    monkeypatch.setenv("THALWEG_IMPLEMENTATION", "topk=reference")
    assert topk(logits, lengths, 1).tolist() == [[1]]
    assert topk(logits, lengths, 1, implementation="reference").tolist() == [[1]]
    monkeypatch.setenv("THALWEG_IMPLEMENTATION", "topk=refrence")
    with pytest.raises(ValueError, match=r"topk has no implementation 'refrence'; it has: .*reference"):
        topk(logits, lengths, 1)
    monkeypatch.delenv("THALWEG_IMPLEMENTATION")
    with pytest.raises(ValueError, match=r"topk has no implementation 'cuda'"):
        topk(logits, lengths, 1, implementation="cuda")


def test_explain_counts_the_calls_of_this_process() -> None:
    def calls() -> int:
        (choice,) = [choice for choice in explain("cpu") if choice.operation == "topk"]
        return sum(choice.calls.values())

    before = calls()
    topk(torch.zeros(1, 3), torch.tensor([3]), 1)
    assert calls() == before + 1
