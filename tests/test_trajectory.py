"""Every backend, at every world size and accumulation, computes what one process computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from launch.plan import Plan
from tasks.token_tagging import TokenTaggingSettings
from tests.launching import DISTRIBUTED, probe, require_backend, run_config
from tests.reference import ReferenceRun, train_reference

SEED, WEIGHT_DECAY, LEARNING_RATE = 3, 0.01, 0.5
GLOBAL_BATCH_SIZE = 16
# 49 = 3 x 16 + 1: the last global batch of an epoch has one sample, so some ranks get none.
SETTINGS = TokenTaggingSettings(num_train_samples=49, num_validation_samples=23)
ACCUMULATIONS = (1, 2, 4)
NUM_EPOCHS = 2
TOLERANCE = 1e-12

WORLDS = [("single", 1), *((name, size) for size in (1, 2, 4) for name in DISTRIBUTED)]


class Group(NamedTuple):
    """What a group of ranks went through: for each case, the observations of each rank."""

    backend: str
    world_size: int
    observed: dict[str, list[dict[str, Any]]]


def _world_id(world: tuple[str, int]) -> str:
    return f"{world[0]}-{world[1]}"


@pytest.fixture(scope="module", params=WORLDS, ids=_world_id)
def group(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Group:
    backend, world_size = request.param
    require_backend(backend)
    directory = tmp_path_factory.mktemp(f"{backend}{world_size}")
    cases = []
    for accumulation in ACCUMULATIONS:
        for count_reductions in (False, True):
            if count_reductions and world_size == 1:
                continue
            config = run_config(
                backend,
                world_size,
                directory,
                task_settings=SETTINGS.model_dump(),
                seed=SEED,
                weight_decay=WEIGHT_DECAY,
                learning_rate=LEARNING_RATE,
                global_batch_size=GLOBAL_BATCH_SIZE,
                micro_batch_size=GLOBAL_BATCH_SIZE // (world_size * accumulation),
                num_train_epochs=NUM_EPOCHS,
                logging_steps=3,
                eval_batch_size=5,
            )
            name = f"accumulation{accumulation}" + ("-counted" if count_reductions else "")
            cases.append({"name": name, "config": config.model_dump(mode="json"), "count_reductions": count_reductions})
    probe(backend, world_size, directory, cases)
    return Group(backend, world_size, {case["name"]: _read(directory, case["name"], world_size) for case in cases})


def _read(directory: Path, name: str, world_size: int) -> list[dict[str, Any]]:
    return [torch.load(directory / f"{name}.rank{rank}.pt") for rank in range(world_size)]


def _reference(initial: dict[str, torch.Tensor]) -> ReferenceRun:
    return train_reference(
        initial,
        SETTINGS,
        global_batch_size=GLOBAL_BATCH_SIZE,
        seed=SEED,
        num_epochs=NUM_EPOCHS,
        learning_rate=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
    )


def _distance(these: dict[str, torch.Tensor], those: dict[str, torch.Tensor]) -> float:
    """Norm of the difference relative to the norm, over all tensors together."""
    assert these.keys() == those.keys()
    difference = torch.cat([(these[name] - those[name]).flatten().double() for name in those])
    whole = torch.cat([those[name].flatten().double() for name in those])
    return float(difference.norm() / whole.norm())


@pytest.mark.parametrize("accumulation", ACCUMULATIONS)
def test_gradients_and_weights_are_those_of_the_reference(group: Group, accumulation: int) -> None:
    ranks = group.observed[f"accumulation{accumulation}"]
    reference = _reference(ranks[0]["initial"])
    for rank, seen in enumerate(ranks):
        assert len(seen["gradients"]) == len(reference.gradients)
        for step, expected in enumerate(reference.gradients, start=1):
            assert _distance(seen["gradients"][step], expected) <= TOLERANCE, f"gradient of rank {rank}, step {step}"
        assert _distance(seen["final"], reference.final) <= TOLERANCE, f"weights of rank {rank}"


@pytest.mark.parametrize("accumulation", ACCUMULATIONS)
def test_logged_losses_are_global_means_on_every_rank(group: Group, accumulation: int) -> None:
    ranks = group.observed[f"accumulation{accumulation}"]
    reference = _reference(ranks[0]["initial"])
    for seen in ranks:
        assert [step["loss"] for step in seen["steps"]] == pytest.approx(reference.losses, rel=TOLERANCE)


@pytest.mark.parametrize("accumulation", ACCUMULATIONS)
def test_evaluation_is_that_of_a_single_process(group: Group, accumulation: int) -> None:
    ranks = group.observed[f"accumulation{accumulation}"]
    reference = _reference(ranks[0]["initial"])
    for seen in ranks:
        assert len(seen["evaluations"]) == NUM_EPOCHS
        metrics = seen["evaluations"][-1]["metrics"]
        assert metrics["loss"] == pytest.approx(reference.validation_loss, rel=TOLERANCE)
        assert metrics["accuracy"] == reference.validation_accuracy


@pytest.mark.parametrize("accumulation", ACCUMULATIONS)
def test_consumed_samples_are_the_plan(group: Group, accumulation: int) -> None:
    ranks = group.observed[f"accumulation{accumulation}"]
    batches = _reference(ranks[0]["initial"]).batches
    plan = Plan(
        num_samples=SETTINGS.num_train_samples,
        global_batch_size=GLOBAL_BATCH_SIZE,
        micro_batch_size=GLOBAL_BATCH_SIZE // (group.world_size * accumulation),
        world_size=group.world_size,
        seed=SEED,
    )
    planned_batches = [batch for epoch in range(NUM_EPOCHS) for batch in plan.epoch(epoch)]
    assert [batch.tolist() for batch in planned_batches] == batches
    counted: list[int] = []
    for rank, seen in enumerate(ranks):
        planned = [share for batch in planned_batches for share in plan.micro_batches(batch, rank)]
        assert seen["consumed"] == [share.sample_ids.tolist() for share in planned]
        counted += [int(sample_id) for share in planned if share.weight for sample_id in share.sample_ids]
    assert sorted(counted) == sorted(list(range(SETTINGS.num_train_samples)) * NUM_EPOCHS)


@pytest.mark.parametrize("group", [world for world in WORLDS if world[1] > 1], ids=_world_id, indirect=True)
@pytest.mark.parametrize("accumulation", ACCUMULATIONS)
def test_every_gradient_element_is_reduced_once_a_step(group: Group, accumulation: int) -> None:
    for seen in group.observed[f"accumulation{accumulation}-counted"]:
        assert sum(seen["reduced_elements"]) == seen["num_parameters"] * len(seen["steps"])


@pytest.mark.parametrize("accumulation", ACCUMULATIONS)
def test_nothing_else_is_reduced_between_loggings(group: Group, accumulation: int) -> None:
    for seen in group.observed[f"accumulation{accumulation}"]:
        # Steps 1, 3, 4 (end of epoch), 6 and 8 log; each epoch evaluates once.
        assert seen["num_other_reductions"] == 5 + NUM_EPOCHS


def test_setup_makes_ranks_equal_that_were_seeded_apart(group: Group) -> None:
    ranks = group.observed["accumulation1"]
    assert set(ranks[0]["buffers"]) == {"marks", "hidden_marks"}
    for seen in ranks[1:]:
        assert all(torch.equal(seen["buffers"][name], buffer) for name, buffer in ranks[0]["buffers"].items())
        assert all(torch.equal(seen["initial"][name], tensor) for name, tensor in ranks[0]["initial"].items())
