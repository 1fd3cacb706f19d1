"""Loops of other libraries that ``gpu_speed.py`` times: transformers' Trainer, TRL and timm."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from gpu_loops import CLIP, FOREVER, LEARNING_RATE, WARMUP, WEIGHT_DECAY, LabelledRows, WithLoss
from gpu_pacer import LOG_EVERY, Pacer, Setting
from gpu_workloads import LORA_RANK, LORA_TARGETS, Images, Text

MASKLESS = "causal_without_a_mask"  # name in transformers' attention registry


def shared_arguments(setting: Setting) -> dict[str, Any]:
    """Return the arguments of transformers' trainers that are the same for all of them."""
    workload = setting.workload
    return {
        "output_dir": str(setting.folder / "trainer"),
        "per_device_train_batch_size": workload.rows,
        "max_steps": FOREVER,
        "learning_rate": LEARNING_RATE,
        "weight_decay": WEIGHT_DECAY,
        "max_grad_norm": CLIP,
        "optim": "adamw_torch_fused",
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": WARMUP,
        "logging_steps": LOG_EVERY,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "logging_nan_inf_filter": False,  # it would wait for the device in every step
        "dataloader_num_workers": workload.workers if isinstance(workload, Images) else 2,
        "train_sampling_strategy": "sequential",  # the batches of the other loops
        "bf16": setting.mixed_precision == "bf16",
        "use_cpu": setting.device.type == "cpu",
    }


def _paced(pacer: Pacer) -> Any:
    """Return a callback that calls the pacer at each step."""
    from transformers import TrainerCallback

    class Paced(TrainerCallback):
        def on_step_begin(self, *given: Any, **more: Any) -> None:
            pacer.step()

    return Paced()


def by_trainer(setting: Setting, pacer: Pacer, *, tuned: bool = False) -> None:
    """Train with transformers' Trainer.

    Args:
        setting: what is trained, and where.
        pacer: of this process.
        tuned: with Liger's kernels, and attention without a mask.
    """
    from transformers import Trainer, TrainingArguments

    workload = setting.workload
    model = workload.build(setting.device)
    if isinstance(workload, Images):
        model = WithLoss(model)
    elif tuned:
        without_mask(model)
    pacer.knows(model)
    arguments = TrainingArguments(
        **shared_arguments(setting),
        label_names=["labels"],
        torch_compile=setting.compiled,
        use_liger_kernel=tuned and setting.device.type == "cuda",  # it has no kernels for CPUs
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=LabelledRows(workload),
        callbacks=[_paced(pacer)],
    )
    trainer.train()


def by_tuned_trainer(setting: Setting, pacer: Pacer) -> None:
    """Train with transformers' Trainer, as its users tune it."""
    by_trainer(setting, pacer, tuned=True)


def without_mask(model: Any) -> None:
    """Let a compiled model use SDPA's causal kernels.

    In a compiled graph, transformers makes a dense mask, which rules out flash attention. It makes
    none for an attention function without a mask function (its documented interface).
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(MASKLESS, sdpa_attention_forward)
    model.set_attn_implementation(MASKLESS)


def by_sft_trainer(setting: Setting, pacer: Pacer) -> None:
    """Train adapters with TRL's SFTTrainer: padding-free, with Liger's kernels for layers.

    The loss is TRL's own, which also computes the entropy and the accuracy of the tokens. If it is
    compiled, attention has no mask (a row is one text); TRL would make a dense one.
    """
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    workload = setting.workload
    assert isinstance(workload, Text)
    assert workload.lora
    rows = LabelledRows(workload)
    tokens = [rows[number]["input_ids"].tolist() for number in range(workload.batches)]
    data = Dataset.from_dict({"input_ids": tokens})
    data = data.select([number % len(tokens) for number in range(100 * len(tokens))])
    model = workload.base(setting.device)
    if setting.compiled:
        without_mask(model)
    arguments = SFTConfig(
        **shared_arguments(setting),
        padding_free=True,
        max_length=None,  # padding_free requires it: all rows are full
        gradient_checkpointing=False,  # TRL's default is True; the other loops use none
        use_liger_kernel=setting.device.type == "cuda",
        torch_compile=setting.compiled,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=data,
        processing_class=_tokenizer(workload),
        peft_config=LoraConfig(
            r=LORA_RANK, lora_alpha=32, target_modules=LORA_TARGETS, task_type="CAUSAL_LM"
        ),
        callbacks=[_paced(pacer)],
    )
    pacer.knows(trainer.model)
    trainer.train()


def _tokenizer(workload: Text) -> Any:
    """Return a tokenizer with an end token, which TRL asks for; it tokenizes nothing here."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"<{number}>": number for number in range(8)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<0>"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<1>", pad_token="<2>")


def by_timm(setting: Setting, pacer: Pacer) -> None:
    """Train with timm's model, optimizer and clipping, in the order of its train.py.

    timm's own loader, which copies the next batch on another stream, is not used.
    """
    from timm.optim import create_optimizer_v2
    from timm.utils import dispatch_clip_grad
    from torch.utils.data import DataLoader, RandomSampler

    workload = setting.workload
    assert isinstance(workload, Images)
    on_gpu = setting.device.type == "cuda"
    torch.backends.cudnn.benchmark = True
    model = workload.build(setting.device)
    if workload.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = create_optimizer_v2(
        model, opt="adamw", lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, betas=(0.9, 0.95)
    )
    compiled = torch.compile(model) if setting.compiled else model
    loader = DataLoader(
        workload.samples,  # type: ignore[arg-type]
        batch_size=workload.rows,
        sampler=RandomSampler(workload.samples, replacement=True, num_samples=10**8),
        num_workers=workload.workers,
        pin_memory=on_gpu,
        drop_last=True,
    )
    for number, batch in enumerate(loader):
        pacer.step()
        image = batch["image"].to(setting.device, non_blocking=True)
        label = batch["label"].to(setting.device, non_blocking=True)
        if workload.channels_last:
            image = image.contiguous(memory_format=torch.channels_last)
        with torch.autocast(
            setting.device.type, torch.bfloat16, enabled=setting.mixed_precision == "bf16"
        ):
            loss = F.cross_entropy(compiled(image), label)
        loss.backward()
        dispatch_clip_grad(model.parameters(), CLIP)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (number + 1) / WARMUP)
        optimizer.step()
        optimizer.zero_grad()
        if number % LOG_EVERY == LOG_EVERY - 1:
            loss.item()  # host wait
