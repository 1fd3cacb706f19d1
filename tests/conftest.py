"""Set-up for all tests: few threads, a temporary cache, and the list of tests that are also
slow."""

import atexit
import os
import re
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "ONELOOP_CACHE" not in os.environ:  # an empty cache for this session
    os.environ["ONELOOP_CACHE"] = tempfile.mkdtemp(prefix="oneloop-cache-")
    atexit.register(shutil.rmtree, os.environ["ONELOOP_CACHE"], ignore_errors=True)

REPEATED = """
test_wheel.py::test_the_template_and_the_notebook_run_without_a_checkout
test_text_pairs.py::test_sentence_transformers_loads_the_export_with_the_same_embeddings[last]
test_text_pairs.py::test_sentence_transformers_loads_the_export_with_the_same_embeddings[cls]
test_apply.py::test_the_metrics_are_those_of_the_run[ddp-3]
test_apply.py::test_predictions_do_not_need_the_training_data[text_regression]
test_apply.py::test_through_the_launcher_as_typed
test_apply.py::test_a_row_for_each_image_in_order_whatever_the_ranks
test_endings.py::test_a_killed_supervisor_is_reported
test_endings.py::test_what_a_task_does_once_per_evaluation_or_epoch_has_its_own_limit[compute]
test_endings.py::test_a_stop_is_heard_where_a_sample_blocks
test_endings.py::test_who_hangs_is_named_and_all_go[1-ddp-2-kill:SIGSTOP-loss]
test_endings.py::test_who_hangs_is_named_and_all_go[1-single-1-loop-loss]
test_endings.py::test_a_death_is_named_and_all_go[1-fsdp2-exit:3-loss]
test_endings.py::test_a_death_is_named_and_all_go[1-ddp-
test_endings.py::test_a_hang_before_the_first_checkpoint_starts_over
test_endings.py::test_a_worker_that_hangs_shows_its_stack
test_endings.py::test_data_workers_go_with_their_trainer
test_endings.py::test_another_folder_on_each_rank_is_rejected
test_endings.py::test_ranks_that_see_other_things_are_rejected[ddp-wider
test_endings.py::test_a_signal_to_the_launcher_saves
test_odd_endings.py::test_variables_that_others_have_left
test_odd_endings.py::test_without_standard_streams
test_odd_endings.py::test_nobody_reads
test_odd_endings.py::test_a_thread_that_stays_holds_nobody
test_lora.py::test_a_resumed_run_is_the_run_left_alone[fsdp2-2-adamw]
test_lora.py::test_a_storage_that_does_not_shard_is_rejected_under_fsdp2
test_lora.py::test_metrics_afterwards_are_those_of_the_run[single-1]
test_lora.py::test_forty_steps_are_those_of_plain_peft[ddp-2]
test_lora.py::test_forty_steps_are_those_of_plain_peft[fsdp2-2]
test_nothing_silent.py::test_it_is_reported_and_nothing_is_written[what one rank alone finds, under FSDP2]
test_chat_wrong.py::test_it_is_reported_at_the_command_line
test_terminal.py::test_a_run_on_a_terminal_shows_all_that_takes_time
test_recompute.py::test_a_run_is_the_same_to_the_bit[2-fsdp2]
test_fit.py::test_a_class_of_the_script_that_runs_is_found_again
test_alone.py::test_batch_size_in_a_plain_script
test_as_they_are.py::test_unused_parameters_train_alike_everywhere
test_as_they_are.py::test_what_is_tried_changes_no_bit[digits-2-fsdp2]
test_as_they_are.py::test_what_is_tried_changes_no_bit[norm-2-fsdp2]
test_as_they_are.py::test_a_long_run_is_shown_in_little_time_and_memory[30000]
test_as_they_are.py::test_metrics_of_the_loss_are_logged_as_weighted_means[2-ddp-2]
test_going_on.py::test_a_disk_that_is_too_small_is_reported_before_anything_is_written
test_going_on.py::test_a_disk_that_cannot_be_written_is_reported
test_going_on.py::test_only_export_imports_what_a_recipe_names_and_reports_it
test_image_models.py::test_a_pretrained_model_is_fine_tuned_gone_on_with_and_loaded_where_it_is_from[transformers-ddp-2]
test_seeded_samples.py::test_weights_are_those_of_seeding_always[nothing-2-ddp-2]
test_worth.py::test_a_run_of_it_from_the_command_line
test_frozen_weights.py::test_what_is_damaged_is_rebuilt_or_rejected[ddp-2]
test_own_docs.py::test_a_recipe_of_models_trains_and_predicts
test_own_docs.py::test_the_student_learns_from_its_teacher[ddp-2]
test_docs_programs.py::test_two_losses_one_of_them_warmed_up[ddp-2]
test_evaluation.py::test_a_metric_of_several_values_has_their_names_or_is_rejected[2-ddp]
test_bad_input.py::test_the_commands_as_typed[command3
test_bad_input.py::test_the_commands_as_typed[command4
test_bad_input.py::test_all_ranks_end_together[words4
test_run_reader.py::test_a_tasks_own_bug_states_where
test_run_reader.py::test_hsdp_trains_the_same_weights_on_four_processes
test_run_reader.py::test_a_nan_ends_the_run_with_3[torch.optim.RMSprop-
test_own_texts.py::test_a_language_model_is_fine_tuned_gone_on_with_and_loaded_by_transformers[text_classification-fsdp2-2]
test_bad_step_policy.py::test_a_bad_step_might_as_well_not_have_been[rewind-2-ddp-
test_bad_step_policy.py::test_a_bad_step_might_as_well_not_have_been[skip-2-fsdp2-
test_checkpoints.py::test_any_world_loads_what_any_other_wrote[True-4-hsdp]
test_checkpoints.py::test_any_world_loads_what_any_other_wrote[True-2-ddp]
test_noise_scale.py::test_measuring_changes_nothing
test_lora_others.py::test_adapters_of_other_kinds_are_rejected[
test_lora_others.py::test_adapters_on_a_model_that_has_changed
test_flops.py::test_what_is_slow_is_named_with_its_share[words1
test_own_task.py::test_the_template_trains_and_is_found_again_from_another_folder[fsdp2-2]
test_image_classification.py::test_the_gradients_are_those_of_any_split[float32-1e-06]
test_image_classification.py::test_shares_of_classes_are_trained_on[fsdp2-2]
test_replicas.py::test_one_flipped_bit_is_found_and_named[4-hsdp-3]
test_resume.py::test_a_resumed_run_is_the_run_left_alone[adamw-2-ddp]
test_sft.py::test_every_question_is_answered[fsdp2]
test_zoo.py::test_a_model_trains_the_same_weights_on_two_processes_or_is_rejected[MaxNorm-fsdp2-False]
test_zoo.py::test_a_model_trains_the_same_weights_on_two_processes_or_is_rejected[Transposed-fsdp2-False]
test_start.py::test_help_and_bad_input_import_neither_accelerate_nor_the_loop[words1]
test_chat_wrong.py::test_rows_without_a_sample_are_skipped_if_asked_and_listed
test_run_reader.py::test_a_signal_to_one_rank_stops_all_at_the_same_step
test_start.py::test_a_run_of_digits_imports_no_library_that_it_does_not_use
test_lora.py::test_wrong_inputs_are_reported[--task.lora.rank 4 --init.from
test_lora.py::test_wrong_inputs_are_reported[--task.lora.rank 4 --task.lora.targets
test_lora.py::test_wrong_inputs_are_reported[--task.lora.rank 4 --machine.quant_storage
test_lora_others.py::test_adapters_that_are_damaged_are_reported
test_own_data.py::test_every_kind_of_file_trains_every_task[numbers in csv
test_own_data.py::test_every_kind_of_file_trains_every_task[text in parquet
test_own_data.py::test_every_kind_of_file_trains_every_task[words in json lines
test_checkpoints.py::test_any_world_loads_what_any_other_wrote[True-1-single]
test_checkpoints.py::test_any_world_loads_what_any_other_wrote[False-4-hsdp]
test_going_on.py::test_final_holds_what_it_states[2-ddp]
test_image_models.py::test_a_pretrained_model_is_fine_tuned_gone_on_with_and_loaded_where_it_is_from[timm-ddp-2]
test_image_models.py::test_a_pretrained_model_is_fine_tuned_gone_on_with_and_loaded_where_it_is_from[transformers-fsdp2-2]
test_own_texts.py::test_a_language_model_is_fine_tuned_gone_on_with_and_loaded_by_transformers[text_classification-ddp-2]
test_apply.py::test_every_task_states_something_of_every_row[causal_lm]
test_apply.py::test_every_task_states_something_of_every_row[text_regression]
test_seeded_samples.py::test_weights_are_those_of_seeding_always[nothing-2-fsdp2-0]
test_seeded_samples.py::test_weights_are_those_of_seeding_always[numpy, from the middle on-2-fsdp2-0]
test_as_they_are.py::test_complex_weights_train_are_kept_and_come_back[2-ddp]
test_as_they_are.py::test_what_is_tried_changes_no_bit[digits-2-ddp]
test_same_bits.py::test_worlds_that_cannot_be_exact_are_rejected[4-hsdp
test_docs_programs.py::test_both_sides_lose_the_same[how-to/from-trainer.md]
test_bad_input.py::test_all_ranks_end_together[words1
test_bad_input.py::test_all_ranks_end_together[words2
test_no_hidden_cost.py::test_ddp_sends_its_bucket_and_one_small_sum[adamw]
test_endings.py::test_what_a_task_does_once_per_evaluation_or_epoch_has_its_own_limit[epoch]
test_flops.py::test_what_is_slow_is_named_with_its_share[words0
test_own_docs.py::test_a_recipe_of_the_page_trains[mixture.yaml]
test_prove.py::test_a_wrong_rank_is_found_at_its_step_and_tensor[10-4]
test_sft.py::test_the_same_weights_and_answers_on_two_processes[fsdp2]
test_own_task.py::test_a_tasks_own_state_is_saved_and_resumed[fsdp2-2]
test_endings.py::test_garbage_on_the_supervisors_port_does_not_end_supervision
test_lora.py::test_wrong_inputs_are_reported[--task.lora.rank 8
test_own_data.py::test_every_kind_of_file_trains_every_task[a
test_apply.py::test_every_task_states_something_of_every_row[text_classification]
test_apply.py::test_every_task_states_something_of_every_row[token_classification]
test_seeded_samples.py::test_weights_are_those_of_seeding_always[nothing-2-fsdp2
test_replicas.py::test_one_flipped_bit_is_found_and_named[3-ddp-0]
test_run_reader.py::test_a_nan_ends_the_run_with_3[adamw-2-ddp]
test_bad_input.py::test_the_commands_as_typed[command0
test_recipes.py::test_accelerate_launch_as_typed
test_command.py::test_one_process_gets_the_variables_that_accelerate_sets[bf16]
test_checkpoints.py::test_any_world_loads_what_any_other_wrote[False-2-ddp]
test_checkpoints.py::test_any_world_loads_what_any_other_wrote[True-2-fsdp2]
test_frozen_weights.py::test_what_is_damaged_is_rebuilt_or_rejected[fsdp2-2]
test_frozen_weights.py::test_their_type_may_be_another[ddp-2]
test_frozen_weights.py::test_the_average_of_what_was_frozen_begins_with_its_weights[ddp-2]
test_bad_step_policy.py::test_a_bad_step_might_as_well_not_have_been[rewind-2-fsdp2-more2]
test_own_texts.py::test_a_language_model_continues_learning[ddp-2]
test_going_on.py::test_final_holds_what_it_states[2-fsdp2]
test_host_memory.py::test_models_made_in_turn_are_the_same_to_the_bit[ddp-3]
test_image_classification.py::test_shares_of_classes_are_trained_on[ddp-2]
test_ema.py::test_a_run_of_120_steps_has_the_closed_form_of_its_weights[50]
test_odd_endings.py::test_whatever_is_raised_is_named[raise:CancelledError
test_keys.py::test_settings_of_accelerate_are_rejected_or_reported[options6
test_first_hours.py::test_a_damaged_best_checkpoint_is_reported_and_not_taken[fsdp2-2]
test_first_hours.py::test_what_generates[ddp-2]
test_zoo.py::test_a_model_trains_the_same_weights_on_two_processes_or_is_rejected[WeightHook-fsdp2-False]
test_zoo.py::test_a_model_trains_the_same_weights_on_two_processes_or_is_rejected[EverySixth-ddp-True]
test_same_weights.py::test_same_weights_as_one_big_batch[2-4-ddp]
test_same_weights.py::test_same_weights_as_one_big_batch[2-2-ddp]
test_same_weights.py::test_same_weights_as_one_big_batch[2-1-fsdp2]
test_keys.py::test_settings_of_accelerate_are_rejected_or_reported[options3
test_zoo.py::test_a_model_trains_the_same_weights_on_two_processes_or_is_rejected[TowerInside-ddp-True]
test_own_bad.py::test_a_mixture_trains_and_logs_the_loss_of_each_source[fsdp2-2]
test_seeded_samples.py::test_weights_are_those_of_seeding_always[numpy, from the middle on-2-ddp-2]
test_examples.py::test_a_run_leaves_them_in_its_folder_and_in_tensorboard[fsdp2-2]
test_same_bits.py::test_worlds_that_cannot_be_exact_are_rejected[3-ddp
test_bad_input.py::test_all_ranks_end_together[words3
test_own_texts.py::test_a_language_model_is_fine_tuned_gone_on_with_and_loaded_by_transformers[text_regression
test_image_exports.py::test_a_script_without_oneloop_gives_the_numbers_of_predict
test_cli.py::test_nothing_is_unpickled_in_an_export
test_worth.py::test_every_technique_is_keys_of_the_recipe_or_a_reason[cuda
test_same_weights.py::test_same_weights_as_one_big_batch[2-2-fsdp2]
"""  # noqa: E501
"""These tests are slow, too: another default test proves the same claim, or the test waits in real
time."""


HELPERS = Path(__file__).parent / "helpers"


@cache
def needs_linux(file: Path) -> bool:
    """Return whether a test file, or a helper that it imports, uses what only Linux has."""
    text = file.read_text(encoding="utf-8")
    for name in re.findall(r"^\s*(?:from|import) (\w+)", text, re.M):
        helper = HELPERS / f"{name}.py"
        if helper.exists():
            text += helper.read_text(encoding="utf-8")
    return re.search(r"/proc/(self|\{)|os\.sched_|memfd_create", text) is not None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    repeated = tuple(REPEATED.split("\n")[1:-1])
    for item in items:
        if f"{item.path.name}::{item.nodeid.partition('::')[2]}".startswith(repeated):
            item.add_marker(pytest.mark.slow)
        if sys.platform != "linux" and needs_linux(item.path):
            item.add_marker(pytest.mark.skip(reason="reads files of Linux's kernel"))
