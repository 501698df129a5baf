"""Which batches a run makes: the default, what is asked for and refused, equal work, and what is said of it."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from rich.console import Console

from launch import display, doctor
from launch.batching import describe_imbalance, describe_padding, settle_batching
from launch.errors import UsageError
from records import processor
from records.balance import imbalance, positions_per_token
from records.config import RunOptions
from records.processor import SLOW_BF16, has_bf16
from records.record import read_record
from tasks.interface import Task
from tasks.text.classification import TextClassification
from tasks.text.settings import TextClassificationSettings
from tasks.token_tagging import TokenTagging, TokenTaggingSettings
from tests.faulty import SlowSettings, SlowTask
from tests.launching import run_config, train
from tests.resuming import assert_equal_to_rounding, weights
from training.plan import Layout, Plan, expected_imbalance

ROWS = [("short", "a"), ("of a middling length", "b"), ("as long as any text of all these is", "a"), ("two words", "b")]


class _Silent(TokenTagging):
    """Tells nothing of the lengths of its samples."""

    def costs(self, split: Any) -> Any:
        return None


class Squares(TokenTagging):
    """Says that a sentence which is twice as long takes four times as long."""

    def costs(self, split: Any) -> Any:
        return super().costs(split) ** 2


class TextsInFloat64(TextClassification):
    """The same task, whose model computes with all digits of float64."""

    collate_packed = TextClassification.collate_packed  # the model takes rows, too

    def build_model(self) -> Any:
        return super().build_model().double()


def _texts(directory: Path) -> dict[str, Path]:
    lines = ["text,label", *(f"{text},{label}" for text, label in ROWS * 8)]
    for split in ("train", "validation"):
        (directory / f"{split}.csv").write_text("\n".join(lines))
    return {f"{split}_file": directory / f"{split}.csv" for split in ("train", "validation")}


def _pretrained(tmp_path: Path, kind: str) -> str:
    """A model of a type in a directory of its own; the samples of albert are not packed."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    from tasks.text.tokenizers import train_wordpiece

    directory = tmp_path / kind
    sizes = {"vocab_size": 300, "embedding_size": 8, "hidden_size": 16, "num_attention_heads": 2}
    sizes |= {"num_hidden_layers": 2, "intermediate_size": 16, "pad_token_id": 0}
    config = AutoConfig.for_model(kind, **sizes)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(directory)
    train_wordpiece([text for text, _ in ROWS], vocab_size=300, max_length=512).save_pretrained(directory)
    return str(directory)


def _task(tmp_path: Path, **settings: Any) -> TextClassification:
    task = TextClassification(TextClassificationSettings(**_texts(tmp_path), **settings))
    task.prepare()
    return task


def _tagging(kind: type[TokenTagging] = TokenTagging) -> Task:
    return kind(TokenTaggingSettings())


def _options(**options: Any) -> RunOptions:
    return RunOptions.model_validate({"task": "token-tagging", **options})


def test_what_is_best_is_the_default(tmp_path: Path) -> None:
    assert settle_batching(_options(), _task(tmp_path)) == "packed"
    assert settle_batching(_options(), _tagging()) == "packed"
    assert settle_batching(_options(), _task(tmp_path, model=_pretrained(tmp_path, "albert"))) == "sorted"
    assert settle_batching(_options(), SlowTask(SlowSettings())) == "padded"
    assert settle_batching(_options(), _tagging(_Silent)) == "packed"  # without lengths, ranks get equal numbers
    assert settle_batching(_options(torch_compile=True), _tagging()) == "padded"


def test_a_run_says_why_it_computes_padding(tmp_path: Path) -> None:
    albert = _task(tmp_path, model=_pretrained(tmp_path, "albert"))
    config = run_config("ddp", 2, tmp_path, micro_batch_size=8, batching="sorted")
    said = describe_padding(config, albert, cuts_batches=False)
    assert said is not None
    assert "sorted instead of packed, which would need no padding: the model is of the type 'albert'" in said
    assert describe_padding(config, _task(tmp_path), cuts_batches=False) is None  # as the user asked
    assert describe_padding(config.model_copy(update={"batching": "packed"}), albert, cuts_batches=False) is None


def test_what_is_asked_for_is_done(tmp_path: Path) -> None:
    for batching in ("packed", "sorted", "padded"):
        assert settle_batching(_options(batching=batching), _task(tmp_path)) == batching


def test_what_cannot_be_done_is_refused(tmp_path: Path) -> None:
    albert = _task(tmp_path, model=_pretrained(tmp_path, "albert"))
    for task, options, words in (
        (
            albert,
            {"batching": "packed"},
            "packed: the model is of the type 'albert', and samples are packed for bert, ",
        ),
        (SlowTask(SlowSettings()), {"batching": "packed"}, "packed: SlowTask changes the task that has such batches"),
        (_tagging(), {"batching": "packed", "torch_compile": True}, "packed: --torch-compile would compile the model"),
        (_tagging(_Silent), {"batching": "sorted"}, "sorted: the task does not tell the lengths of its samples; use"),
    ):
        with pytest.raises(UsageError, match=words):
            settle_batching(_options(**options), task)


def _plan(lengths: Any, world_size: int, *, batching: Any, samples_of_a_rank: int = 16, micro_steps: int = 1) -> Plan:
    return Plan(
        num_samples=len(lengths),
        global_batch_size=world_size * samples_of_a_rank * micro_steps,
        micro_batch_size=samples_of_a_rank,
        world_size=world_size,
        seed=5,
        layout=Layout(batching, np.asarray(lengths)),
    )


def _like_sentences(number: int) -> Any:
    """Lengths that are as unequal as those of sentences: their logarithm is normal, with a deviation of 0.5."""
    drawn = np.random.default_rng(1).lognormal(3.2, 0.5, number)
    return np.clip(drawn, 3, 128).astype(np.int64)


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_packed_ranks_get_equal_work(world_size: int) -> None:
    lengths = _like_sentences(4000)
    assert expected_imbalance(_plan(lengths, world_size, batching="packed")) <= 1.02
    assert expected_imbalance(_plan(lengths, world_size, batching="packed", samples_of_a_rank=4)) <= 1.05
    assert expected_imbalance(_plan(lengths, world_size, batching="padded")) > 1.05


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_sorted_ranks_get_about_equal_work(world_size: int) -> None:
    lengths = _like_sentences(4000)
    plan = _plan(lengths, world_size, batching="sorted")
    assert expected_imbalance(plan) <= 1.05
    num_positions = sum(plan.work(batch).sum() for batch in plan.epoch(0))
    assert num_positions / lengths.sum() <= 1.25
    # A multiple of the micro-batch, and equal lengths of which pieces of equal cost would leave one too short.
    assert expected_imbalance(_plan(lengths, world_size, batching="sorted", micro_steps=2)) <= 1.05
    assert expected_imbalance(_plan([9] * 160, world_size, batching="sorted", samples_of_a_rank=5)) == 1.0


@pytest.mark.parametrize("batching", ["packed", "sorted", "padded"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_every_sample_is_computed_once(batching: str, world_size: int) -> None:
    plan = _plan(_like_sentences(101), world_size, batching=batching, samples_of_a_rank=3)
    for batch in plan.epoch(0):
        shares = [plan.micro_batches(batch, rank) for rank in range(world_size)]
        assert len({len(share) for share in shares}) == 1
        computed = [one for share in shares for part in share if part.weight for one in part.sample_ids.tolist()]
        assert sorted(computed) == sorted(batch.tolist())


def test_sorted_batches_have_samples_of_similar_lengths() -> None:
    lengths = _like_sentences(200)
    plan = _plan(lengths, 2, batching="sorted")
    for batch in plan.epoch(0)[:-1]:
        first, second = zip(*(plan.micro_batches(batch, rank) for rank in range(2)), strict=True)
        shortest_of_long = min(int(lengths[part.sample_ids].min()) for part in first)
        assert shortest_of_long >= max(int(lengths[part.sample_ids].max()) for part in second)


def test_a_sample_larger_than_a_share_is_told() -> None:
    config = run_config("ddp", 2, Path(), global_batch_size=4, micro_batch_size=2, batching="packed")

    class Unequal(TokenTagging):
        longest = 1000

        def costs(self, split: Any) -> Any:
            return np.array([self.longest, *[1] * (self.num_samples(split) - 1)])

    task = Unequal(TokenTaggingSettings(num_train_samples=4))
    for batching, torch_compile, layout in (
        ("packed", False, ""),
        ("padded", False, "--batching packed, "),
        ("sorted", False, "--batching packed, "),
        ("padded", True, ""),
    ):
        options = {"batching": batching, "torch_compile": torch_compile}
        said = describe_imbalance(config.model_copy(update=options), task, cuts_batches=False)
        assert said is not None
        assert re.match(
            r"ranks get unequal work: the one with most has (1.99|2.00) times the mean, and the others", said
        )
        assert said.endswith(f"wait for it; {layout}a larger --global-batch-size or fewer ranks may help")
    task.longest = 1
    assert describe_imbalance(config, task, cuts_batches=False) is None


def test_a_single_step_far_out_is_told() -> None:
    """Among the first steps, whose mean does not show it, or later; not after the last step of the training."""
    options = {"global_batch_size": 4, "micro_batch_size": 2, "batching": "packed"}
    config = run_config("ddp", 2, Path(), **options, max_steps=40)

    class Outlier(TokenTagging):
        longest = 0

        def costs(self, split: Any) -> Any:
            costs = np.full(self.num_samples(split), 10)
            costs[self.longest] = 120
            return costs

    task = Outlier(TokenTaggingSettings(num_train_samples=202))
    batches = Plan.of(config, task).epoch(0)
    for step in (3, 40):
        task.longest = int(batches[step - 1][1])
        assert expected_imbalance(Plan.of(config, task)) <= 1.05
        # 120 beside 10 + 10 + 10, of which each rank would have 75.
        assert describe_imbalance(config, task, cuts_batches=False) == (
            f"ranks get unequal work in step {step} of the first epoch: the one with most has 1.60 times the mean, and "
            "the others wait for it; a larger --global-batch-size or fewer ranks may help"
        )
    whole_epochs = config.model_copy(update={"max_steps": -1})
    task.longest = int(batches[40][0])
    assert describe_imbalance(config, task, cuts_batches=False) is None
    assert "in step 41 of" in (describe_imbalance(whole_epochs, task, cuts_batches=False) or "")
    task.longest = int(batches[-1][0])  # of a batch of two samples
    assert describe_imbalance(whole_epochs, task, cuts_batches=False) is None


@pytest.mark.parametrize("batching", ["packed", "sorted", "padded"])
def test_the_record_says_what_was_computed(tmp_path: Path, batching: str) -> None:
    options = ("--task", "token-tagging", "--num-processes", "2", "--max-steps", "5", "--batching", batching)
    record = train("ddp", tmp_path / "run", *options)
    assert record["config"]["batching"] == batching
    computed, uneven = record["positions_per_token"], record["imbalance"]
    tokens, positions = (sum(sum(rank[name]) for rank in record["ranks"]) for name in ("tokens", "positions"))
    assert computed == pytest.approx(positions / tokens)
    evaluated = [one["positions_per_token"] for one in record["evaluations"]]
    if batching == "packed":
        assert computed == 1.0
        assert set(evaluated) == {1.0}
        assert uneven <= 1.05
    else:
        assert min(computed, *evaluated) > 1.1


@pytest.mark.parametrize("batching", ["packed", "padded"])
def test_the_record_has_the_imbalance_of_the_dry_run(tmp_path: Path, batching: str) -> None:
    """Also with a last step of one sample, which both ranks compute."""
    options = ["--num-train-samples", "9", "--global-batch-size", "8", "--num-train-epochs", "1", "--no-evaluate"]
    options += ["--task", f"{__name__}:Squares", "--num-processes", "2", "--batching", batching]
    train("ddp", tmp_path, *options)
    record = read_record(tmp_path / "record.json")
    with_sample, without = record.ranks
    assert [rank.samples[1] for rank in record.ranks] == [1, 0]
    assert without.tokens[1] == 0
    assert without.positions[1] == with_sample.positions[1] == with_sample.tokens[1]
    assert without.work[1] == with_sample.work[1] == with_sample.tokens[1] ** 2
    plan = Plan.of(record.config, Squares(TokenTaggingSettings(num_train_samples=9)))
    assert record.imbalance == pytest.approx(expected_imbalance(plan))


@pytest.mark.parametrize(
    "kind", ["bert", "data2vec-text", "ernie", "roberta", "roberta-prelayernorm", "xlm-roberta-xl"]
)
def test_a_pretrained_model_computes_the_same_from_a_row(tmp_path: Path, kind: str) -> None:
    """Also where it counts positions from the number of the padding token on."""
    task, samples = _task(tmp_path, model=_pretrained(tmp_path, kind)), list(range(len(ROWS)))
    assert settle_batching(_options(), task) == "packed"
    model = task.build_model().double().eval()
    packed = task.logits(model, task.collate_packed("train", samples))
    padded = task.logits(model, task.collate("train", samples))
    torch.testing.assert_close(packed, padded, rtol=1e-12, atol=1e-12)


def test_steps_and_losses_are_the_same_with_any_batches(tmp_path: Path) -> None:
    """With dropout, on one rank and on two, in float32 of the real model."""
    files = [f"--{name.replace('_', '-')}={path}" for name, path in _texts(tmp_path).items()]
    options = ["--dropout", "0.2", "--max-steps", "6", "--global-batch-size", "8", *files]
    records = [
        train("single" if world_size == 1 else "ddp", tmp_path / f"{batching}-{world_size}", *options,
              "--num-processes", str(world_size), "--batching", batching)
        for batching in ("packed", "sorted", "padded") for world_size in (1, 2)
    ]  # fmt: skip
    losses = [[step["loss"] for step in record["steps"]] for record in records]
    assert len({round(loss, 2) for loss in losses[0]}) > 1
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-4)
    evaluated = [[one["positions_per_token"] for one in record["evaluations"]] for record in records]
    assert evaluated[::2] == evaluated[1::2]
    assert all(1 <= ratio <= 1.05 for ratio in evaluated[0])
    assert all(ratio > 1.05 for ratio in evaluated[-1])


def test_bert_takes_the_same_steps_in_float64(tmp_path: Path) -> None:
    """Packed batches on two ranks, and padded ones in one process: with dropout, clipping, AdamW and accumulation.

    The bound is wider than that of a single gradient, since Adam enlarges the rounding of gradients that nearly vanish.
    """
    files = [f"--{name.replace('_', '-')}={path}" for name, path in _texts(tmp_path).items()]
    options = [*files, "--task", f"{__name__}:TextsInFloat64", "--vocab-size=300", "--dropout=0.2", "--no-evaluate"]
    options += ["--max-grad-norm", "0.01", "--max-steps", "4", "--global-batch-size", "8", "--micro-batch-size", "2"]
    ranks = train("ddp", tmp_path / "packed", *options, "--num-processes", "2", "--batching", "packed")
    alone = train("single", tmp_path / "padded", *options, "--num-processes", "1", "--batching", "padded")
    ours, theirs = ([step["grad_norm"] for step in record["steps"]] for record in (ranks, alone))
    assert min(theirs) > 0.01
    assert ours[0] == pytest.approx(theirs[0], rel=1e-12)
    assert ours == pytest.approx(theirs, rel=1e-10)
    assert {weight.dtype for weight in weights(tmp_path / "packed").values()} == {torch.float64}
    assert_equal_to_rounding(tmp_path / "packed", tmp_path / "padded", rel=1e-10)


class _Counts(NamedTuple):
    """What is read of the record of a rank."""

    positions: list[int]
    tokens: list[int]
    work: tuple[int, ...] = ()


def test_a_step_in_which_nothing_is_computed_has_no_balance() -> None:
    ranks: Any = [_Counts([10, 20, 0], [10, 10, 0]), _Counts([30, 20, 0], [10, 10, 0])]
    assert positions_per_token(ranks) == 2.0
    assert imbalance(ranks) == pytest.approx((1.5 + 1.0) / 2)
    with_work: Any = [_Counts([10], [10], (1,)), _Counts([10], [10], (3,))]
    assert imbalance(with_work) == pytest.approx(1.5)
    assert positions_per_token([]) is None
    assert imbalance([]) is None


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        ("processor : 0\nflags\t\t: fpu avx512_bf16 avx\n", True),
        ("flags : fpu amx_tile amx_bf16\n", True),
        ("processor : 0\nFeatures : fp asimd bf16\n", True),
        ("processor : 0\nflags : fpu avx2 avx512f\n", False),
        ("processor : 0\n", True),
    ],
)
def test_a_processor_without_bf16_is_known(cpuinfo: str, expected: bool) -> None:
    assert has_bf16(cpuinfo) is expected


def test_the_doctor_says_whether_the_processor_has_bf16(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for has_it, words in ((True, "the processor has it"), (False, SLOW_BF16)):
        monkeypatch.setattr(doctor, "has_bf16", lambda has_it=has_it: has_it)
        doctor.run([])
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("bf16:")]
        assert lines == [f"bf16: {words}"]


@pytest.mark.parametrize(
    ("precision", "device", "has_it", "is_told"),
    [
        ("bf16", "cpu", False, True),
        ("bf16", "cpu", True, False),
        ("fp32", "cpu", False, False),
        ("bf16", "cuda", False, False),
    ],
)
def test_a_run_in_bf16_says_that_the_processor_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, device: str, has_it: bool, is_told: bool
) -> None:
    monkeypatch.setattr(processor, "has_bf16", lambda: has_it)
    text = io.StringIO()
    config = run_config("ddp", 2, tmp_path, micro_batch_size=16, precision=precision, device=device)
    display.show_start(config, None, Console(file=text, width=200))
    assert (f"bf16: {SLOW_BF16}\n" in text.getvalue()) == is_told
