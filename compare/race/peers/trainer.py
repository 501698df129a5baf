"""transformers.Trainer (https://huggingface.co/docs/transformers/main_classes/trainer), as its documentation has it."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from typing_extensions import override

from compare.race.peers.work import PeerJob, PeerSteps


class _Turns(TrainerCallback):  # type: ignore[misc]
    """Tells of the steps, and rests where the race says so."""

    def __init__(self, steps: PeerSteps) -> None:
        self._steps = steps

    @override
    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._steps.begin()

    @override
    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._steps.end_step()


class _CountingTrainer(Trainer):  # type: ignore[misc]
    """Counts the real tokens of each micro-batch."""

    steps: PeerSteps

    @override
    def training_step(self, model: Any, inputs: dict[str, torch.Tensor], *rest: Any, **options: Any) -> torch.Tensor:
        self.steps.count(inputs["attention_mask"])
        loss: torch.Tensor = super().training_step(model, inputs, *rest, **options)
        return loss


def train(job: PeerJob) -> None:
    """Trains the model of a job."""
    config = job.config
    arguments = TrainingArguments(
        output_dir=str(config.output_dir),
        max_steps=job.num_steps,
        per_device_train_batch_size=config.micro_batch_size,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        train_sampling_strategy=config.backend_settings["train_sampling_strategy"],
        learning_rate=config.learning_rate,
        lr_scheduler_type=config.lr_scheduler,
        warmup_steps=job.num_warmup_steps,
        max_grad_norm=config.max_grad_norm,
        bf16=config.precision == "bf16",
        fp16=config.precision == "fp16",
        use_cpu=config.device == "cpu",
        torch_compile=config.torch_compile,
        dataloader_num_workers=config.dataloader_num_workers,
        logging_steps=config.logging_steps or TrainingArguments.logging_steps,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=config.seed,
    )
    trainer = _CountingTrainer(
        model=job.model,
        args=arguments,
        data_collator=job.collate,
        train_dataset=job.dataset,
        optimizers=(job.optimizer, None),
        callbacks=[_Turns(job.steps)],
    )
    trainer.steps = job.steps
    trainer.train()
    # It casts what the model returns in place; the evaluation is that of any run.
    trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_fp32_wrapper=False)
