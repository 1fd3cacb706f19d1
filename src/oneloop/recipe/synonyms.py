"""oneloop's keys by the names that Trainer, Lightning, accelerate, timm and torchtune use for the same settings."""

import difflib
from collections.abc import Iterable

_NAMES = """
duration: epochs num_epochs num_train_epochs max_epochs n_epochs max_steps num_steps max_train_steps total_steps
batch.size: batch_size global_batch_size train_batch_size total_batch_size effective_batch_size bs
batch.micro: per_device_train_batch_size micro_batch_size device_train_microbatch_size gradient_accumulation_steps
batch.micro: accumulate_grad_batches grad_accum_steps gradient_accumulation accumulation_steps auto_find_batch_size
optimizer.lr: lr learning_rate base_lr max_lr peak_lr
optimizer.name: optim opt optimizer_type optimizer_name
optimizer.weight_decay: weight_decay wd
optimizer.clip: max_grad_norm clip_grad clip_grad_norm gradient_clip_val gradient_clipping grad_clip
optimizer.betas: adam_beta1 adam_beta2 beta1 beta2
optimizer.eps: adam_epsilon epsilon opt_eps
optimizer.momentum: sgd_momentum
optimizer.layer_decay: layer_decay layerwise_lr_decay llrd
schedule.name: lr_scheduler lr_scheduler_type scheduler sched lr_schedule
schedule.warmup: warmup warmup_ratio warmup_steps warmup_epochs num_warmup_steps lr_warmup_steps
schedule.final: min_lr lr_min final_lr eta_min
ema.half_life: use_ema model_ema ema
ema.decay: ema_decay model_ema_decay
eval.every: eval_steps eval_strategy evaluation_strategy eval_interval val_check_interval check_val_every_n_epoch
eval.micro: per_device_eval_batch_size eval_batch_size val_batch_size validation_batch_size
eval.best: metric_for_best_model eval_metric monitor
save.every: save_steps save_strategy save_interval checkpoint_every checkpointing_steps every_n_train_steps save_freq
save.keep: save_total_limit checkpoint_hist checkpoints_total_limit save_top_k
save.final: load_best_model_at_end
stop.patience: early_stopping early_stopping_patience patience
stop.after: max_time time_limit
log.every: logging_steps log_every_n_steps log_interval log_freq
track: report_to log_with logger tracker wandb tensorboard
run.dir: output_dir output default_root_dir save_dir save_folder out_dir logging_dir project_dir
run.resume: resume resume_from_checkpoint ckpt_path checkpoint
machine.recompute: gradient_checkpointing grad_checkpointing activation_checkpointing use_gradient_checkpointing
machine.recompute: enable_activation_checkpointing
machine.compile: torch_compile torchcompile compile compile_model
machine.workers: num_workers dataloader_num_workers workers
machine.pinned: pin_memory pin_mem dataloader_pin_memory
machine.deterministic: deterministic full_determinism
machine.cudnn_benchmark: benchmark
machine.matmul: tf32 matmul_precision float32_matmul_precision
machine.channels_last: channels_last
machine.find_unused_parameters: ddp_find_unused_parameters find_unused_parameters
seed: random_seed manual_seed data_seed
debug.overfit: overfit_batches limit_train_batches max_train_samples max_samples
debug.dry_run: fast_dev_run dry_run
watch.profile: profiler profile
init.from: initial_checkpoint pretrained_checkpoint load_from
task.data: dataset dataset_name data_dir data_path train_file data
task.model: model_name_or_path model_name model_id pretrained_model_name_or_path model
task.pretrained: pretrained
task.length: max_length max_seq_length max_seq_len seq_length
task.block: block_size context_length max_length max_seq_length max_seq_len seq_length
task.pack: packing packed
task.smoothing: label_smoothing label_smoothing_factor smoothing
task.mixup: mixup mixup_alpha
task.image_size: img_size input_size
task.lora.rank: lora_r lora_rank
task.lora.alpha: lora_alpha
task.lora.dropout: lora_dropout
task.lora.targets: target_modules lora_target_modules
task.lora.quantize: load_in_4bit load_in_8bit quantization
"""
_KEYS: dict[str, list[str]] = {}
for _line in _NAMES.split("\n")[1:-1]:
    _key, _, _names = _line.partition(": ")
    for _name in _names.split():
        _KEYS.setdefault(_name, []).append(_key)
OF_TASKS = {key for keys in _KEYS.values() for key in keys if key.startswith("task.")}
_OF_LAUNCHER = {
    "--mixed_precision bf16": "mixed_precision precision bf16 fp16 amp amp_dtype half autocast",
    "--num_processes 2": "num_processes devices nproc_per_node num_gpus gpus world_size",
    "--num_machines 2": "num_machines num_nodes nnodes",
    "--config_file fsdp2": "strategy fsdp fsdp_config deepspeed distributed_type config_file",
}
_OPTIONS = {name: option for option, names in _OF_LAUNCHER.items() for name in names.split()}


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean …?" for an unknown key or name, by its synonyms, else by spelling; else nothing.

    Of a key with a group (``run.output_dir``, ``task.seed``), the part after the dot is looked up."""
    known = list(known)
    last = word.rpartition(".")[2].replace("-", "_").lower()
    if last in known:  # a top-level key inside a group
        return f"; did you mean {last!r}?"
    if (option := _OPTIONS.get(last)) and "duration" in known:
        return f"; it is an option of the launcher: oneloop launch --config_file ddp {option} RECIPE …"
    synonyms = [key for key in _KEYS.get(last, ()) if key in known]
    near = synonyms or difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def may_be_of_task(word: str) -> bool:
    """Whether an unknown key is another name of a task's key, which only the imported task knows."""
    return not OF_TASKS.isdisjoint(_KEYS.get(word.rpartition(".")[2], ()))
