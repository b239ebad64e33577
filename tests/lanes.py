"""The two lanes of the tests, and what the first may cost.

`make test` runs every promise once. `make test-all` (`pytest --all`) adds what is a matrix or a stress: the cases that
the tables below leave out, and every test that starts processes through the `python` fixture. A test that is named on
the command line (`FILE::TEST`) runs in any case.
"""

import resource
from collections import defaultdict
from collections.abc import Generator
from fnmatch import fnmatchcase

import pytest


def cases(test: str, names: str) -> tuple[str, ...]:
    """Patterns of the cases of a test, from their names between brackets."""
    return tuple(f"{test}?{name}]" for name in names.split())


# File: patterns of the cases that the first lane keeps, by what they cover.
KEPT: dict[str, tuple[str, ...]] = {
    # What is promised; sinks, experts, latent attention, shared keys, state space, linear attention, a scaling that the
    # first choice is not, rotary local layers alone, no rope. Composites with MRoPE, and one that cannot read text.
    "models/test_architectures.py": (
        "test_a_config*",
        "test_mixed*",
        "test_promised*",
        "test_the_page*",
        *cases("test_position*", "llama mistral qwen2 qwen3 gemma2 gemma3_text phi3 olmo2 granite gpt_neox stablelm"),
        *cases("test_position*", "cohere smollm3 gpt_oss qwen3_moe deepseek_v3 gemma4_text falcon_h1 qwen3_5_text"),
        *cases("test_position*", "phimoe cohere2 gpt2"),
        *cases("test_the_language*", "gemma3 mistral3 llava qwen3_vl qwen3_5 qwen2_audio"),
    ),
    # Plain; windows in all layers and in some, soft caps, sinks, shared keys, latent attention, experts, state space,
    # MRoPE, chunks; a kernel of the model's own, and no choice of it.
    "models/test_attention_types.py": (
        *cases("test_logits*", "llama mistral gemma2 gemma3_text gpt_oss gemma4_text deepseek_v3 qwen3_moe falcon_h1"),
        *cases("test_logits*", "qwen2_5_vl llama4"),
        "test_models_that_make_masks*?doge]",
        "test_models_without_a_choice*?falcon]",
    ),
    # One model of each kind: plain, trained on less than it declares, llama3, linear with a tokenizer that says L',
    # yarn in a composite, a rope for each layer type, longrope, a window beside the declared one, and refused ones.
    "models/test_published.py": (
        "test_every_row_*",
        "*?meta-llama/Llama-2-7b-hf]",
        "*?Qwen/Qwen3-8B]",
        "*?meta-llama/Llama-3.1-8B]",
        "*?deepseek-ai/deepseek-coder-1.3b-instruct]",
        "*?mistralai/Ministral-3-3B-Instruct-2512]",
        "*?allenai/Olmo-3.1-32B-Instruct]",
        "*?microsoft/Phi-3.5-mini-instruct]",
        "*?CohereLabs/c4ai-command-r-v01]",
        "*?internlm/*",
        "*?mistralai/Mistral-7B-v0.1]",
        "*?mistralai/Mixtral-8x7B-v0.1]",
        "test_a_model_that_nothing_extends_*",
    ),
    # NF4, some recomputation, sliding windows where every weight trains, experts, the gated delta rule, a CPU.
    "planning/test_plan_simulated.py": (
        "*_simulated?NF4?",
        "*_simulated?selective?",
        "*_simulated?windows, all weights?",
        "*_simulated?experts?",
        "*_simulated?no checkpoints, delta rule?",
        "*_on_a_cpu_are_those_that_are_simulated?False-llama-float32?",
    ),
    # Pages that agree with stored results, and scripts that can be imported.
    "test_benchmark_scripts.py": ("test_pages_*", "test_figures_that_*", "test_help_*"),
    "test_notebook.py": ("test_the_notebook_holds_its_pictures",),
    # The windows of what is released; what it retrieves takes 8 seconds.
    "test_released.py": ("test_the_released_demo_has_*", "test_the_released_smollm2*"),
}
# File: patterns of the cases that the first lane leaves out.
LEFT_OUT: dict[str, tuple[str, ...]] = {
    # Kept: an interruption at the very start, and a caller that closed all streams.
    "cli/test_app.py": ("test_ctrl_c_during_startup_is_one_line?0.5?", "test_ctrl_c*?4?", "*?>&-?"),
    # Kept: plain, norms of queries, rotary parts, local layers, scaled and capped logits.
    "evaluation/test_forward.py": (
        *cases("test_logits_with*", "granite olmo2 qwen2 smollm3 stablelm"),
        *cases("test_only_models*", "granite olmo2 qwen2 smollm3 stablelm"),
        *cases("test_logits_computed*", "llama mistral olmo2 qwen2 smollm3 stablelm"),
    ),
    # Kept: windows that overlap much and not at all.
    "evaluation/test_perplexity_windows.py": cases("test_a_sweep_of*", "24-None 48-None 48-7"),
    # Kept: a needle in a chat template, and as raw text variables, common and frequent words.
    "evaluation/test_ruler.py": cases("test_ruler_scores*", "niah_single_1 niah_multikey_2 niah_multikey_3"),
    # Kept: a rope for each layer type, and a model without yarn.
    "evaluation/test_search.py": cases("test_the_gradient_reaches*", "gpt_neox granite phi"),
    # Kept: every fifth write of a resumption fails, of all weights.
    "faults/test_full_disk.py": ("*whatever_write_failed*-1?", "*whatever_write_failed?lora*"),
    # Kept: one mixture that trains.
    "merging/test_merging_experts.py": ("test_experts_that_trained*?jetmoe?",),
    # Kept: own ranks, rank-stabilized and DoRA, trained modules, rows and biases, heads, tied and untied.
    "merging/test_merging_peft.py": (
        "test_a_qlora_adapter_is_added_to_the_unquantized_base",
        "test_a_streamed_merge_equals_pefts?attention only?",
        "test_a_streamed_merge_equals_pefts?gpt-neox?",
        "test_a_streamed_merge_equals_pefts?lora?",
        "test_a_streamed_merge_equals_pefts?norms?",
        "test_a_streamed_merge_equals_pefts?phi-3?",
        "test_a_streamed_merge_equals_pefts?rows?",
        "test_a_streamed_merge_equals_pefts?rows of gpt-neox?",
        "test_a_streamed_merge_equals_pefts?tied?",
        "test_a_tied_head_that_diverged_is_untied?lora on the head?",
        "test_other_adapters*?LoKrConfig?",
    ),
    # Kept: 4 bits with scales of scales, 8 bits, FP8 in blocks and of experts, MXFP4; a training on FP8.
    "merging/test_merging_quantized.py": (
        "test_an_adapter_is_merged_into_the_dequantized_base?nf4, *",
        "test_an_adapter_is_merged_into_the_dequantized_base?fp8, *",
        "test_lora_trains_on_a_base_that_transformers_dequantizes?with_mxfp4?",
    ),
    # Kept: windows in some layers, soft caps, sinks; padded and not.
    "models/test_attention.py": (
        "test_time_and_memory*?mistral]",
        *cases("test_generation*", "llama-* mistral-True gemma2-True gpt_oss-False"),
    ),
    # Kept: adapters of Gemma 3 (local and global layers), all weights of Qwen 3.5 (linear attention, MRoPE, heads of
    # several tokens).
    "models/test_composite.py": (
        "test_interrupted*",
        *cases("test_*", "mistral3 qwen3_vl glm4v"),
        *cases("test_an_adapter*", "qwen3_5"),
        *cases("test_peft*", "qwen3_5"),
        *cases("test_full_tuning*", "gemma3"),
        *cases("test_an_extension*", "gemma3"),
    ),
    # Kept: a model for which some cards are too small, and a small one.
    "planning/test_new_recipe.py": (
        "test_a_plan_fits_the_card_or_is_refused?[Hm]*",
        "test_a_plan_fits_the_card_or_is_refused?huggyllama/llama-[17]*",
        "test_a_plan_fits_the_card_or_is_refused?Qwen/Qwen3-8B*",
    ),
    # Kept: dense models, experts, sliding windows, linear attention, the built-in one.
    "planning/test_plan.py": (
        "test_shipped_shapes_equal_counted_ones?[am]*",
        "test_shipped_shapes_equal_counted_ones?*-Base?",
        "test_shipped_shapes_equal_counted_ones?huggyllama--llama-[136]*",
    ),
    # Kept: every arithmetic of a LLaMA, LoRA in bfloat16 on each kind of layer, one length of everything else.
    "planning/test_plan_memory.py": (
        "test_adapted_experts_take_the_planned_memory?qwen3_moe?",
        "test_trained_parameters_equal_pefts?[qns]*",
        "test_trained_parameters_equal_pefts?phi3*",
        "test_trained_parameters_equal_pefts?g[el]*",
        "test_a_layer_keeps_the_planned_activations?full-*-[GQ]*",
        "test_a_layer_keeps_the_planned_activations?lora-[acf]*-[GQ]*",
        "test_a_layer_keeps_the_planned_activations?lora on attention-*-[GQ]*",
        "test_a_sliding_layer_keeps_the_planned_masks_and_copies?G*",
        "test_a_sliding_layer_keeps_the_planned_blocks_of_a_gpu?1[25]*",
        "test_measuring_takes_the_planned_activations*-Gemma3*",
        "test_measuring_takes_the_planned_activations*-Qwen3Config*",
        "test_measuring_takes_the_planned_activations*-torch.float32?",
        "test_planned_memory_of_chunked_mlps_is_an_upper_bound?lora-[acf]*",
        "test_planned_memory_of_chunked_mlps_is_an_upper_bound?lora on*",
        "test_planned_memory_of_chunked_mlps_is_an_upper_bound?full*",
    ),
    # Kept: one of the released adapters.
    "report/test_card.py": ("test_released_adapters_give_a_report_and_a_comparison?smollm2*",),
    # Kept: a type of scaling that stands in the file, theta, and divisors.
    "serving/test_gguf.py": (
        "test_a_file_without_the_scaling_of_the_model_is_not_kept?pi?",
        "test_the_divisors_of_llama3_need_an_architecture_that_reads_them?smollm3?",
    ),
    # Kept: the last 95 % of a prompt, and an untrained model that gets a token more.
    "serving/test_serving_check.py": (
        "test_a_server_in_bfloat16_is_right",
        "test_a_server_of_several_models_that_is_not_right*",
        "test_a_server_that_cuts_never_passes?last [257]*",
        "test_a_server_that_cuts_never_passes?first*",
        "test_a_server_that_cuts_never_passes?ends*",
        "test_a_token_that_a_server_adds*?True-*",
        "test_an_untrained_model_is_unclear*",
        "test_another_model_fails_the_check",
    ),
    # Kept: what a launch asks for and answers. Two processes of their own take 30 seconds.
    "test_distributed.py": ("test_two_processes_train_like_one",),
    # Kept: data sets of very few and of many rows. A storage that does not answer is waited for.
    "test_hub.py": (
        "test_a_new_recipe_holds_out_rows*?[26]0?",
        "test_a_storage_that_does_not_answer_ends_a_push",
        "test_a_training_asks_for_the_model_and_the_data_alone_and_keeps_stderr_free",
    ),
    # Kept: LoRA and all weights.
    "training/test_checkpointing.py": ("*qlora*",),
    # Kept: pieces that divide the tokens, that do not, and that cut sequences apart.
    "training/test_chunked_mlp.py": (
        "*tuning[02]-pieces of 1-*",
        "*tuning1-pieces of 1-kept?",
        "*pieces of 37-*",
        "*tuning[12]-pieces of 73-*",
    ),
    # Kept: each head once, tied and untied ones with each tuning; accumulated batches are packed as well.
    "training/test_loss.py": (
        *(f"test_loss_and_gradients*?{head}-*[Ae]*" for head in ("soft caps", "divided", "bias")),
        "test_loss_and_gradients*?scaled-[ef]*",
        "test_trainings_have_the_losses_of_trl?packed?",
    ),
    # Kept: the kernel that is chosen here and eager attention, one of flash attention; the batch that transformers
    # takes for packed texts; experts with MLA.
    "training/test_padding.py": (
        "test_only_eager_gets_a_mask?sdpa?",
        "test_jumps_of_pose*?2?",
        "test_flash_attention*_4?",
        "test_experts_whose_config*?granitemoe?",
    ),
    # Kept: examples, over the end of an epoch.
    "training/test_resume.py": ("test_a_run_resumed_with_less_memory*?packed-*",),
    # Kept: LoRA and all weights under autocast, QLoRA with embeddings and norms.
    "training/test_training_scores.py": ("*?float32?", "*?qlora, bfloat16?"),
}
# Fixtures of tests that need more than this process.
OF_PROCESSES = {"python"}
# CPU seconds of a test and of a file in the first lane, without the fixtures of a session.
MOST_OF_A_TEST = 10.0
MOST_OF_A_FILE = 15.0
# The same share of the lane, for machines on which the whole lane takes more than 350 CPU seconds.
SHARE_OF_A_FILE = MOST_OF_A_FILE / 350

SECONDS = pytest.StashKey[float]()
seconds_of_tests: dict[str, float] = {}


def case_of(item: pytest.Item) -> tuple[str, str]:
    """The file of a test below `tests`, and the rest of its name."""
    file, _, case = item.nodeid.partition("::")
    return file.removeprefix("tests/"), case


def in_first_lane(item: pytest.Item) -> bool:
    """Whether `make test` runs a test."""
    file, case = case_of(item)
    if OF_PROCESSES & set(getattr(item, "fixturenames", ())):
        return False
    if file in KEPT and not any(fnmatchcase(case, pattern) for pattern in KEPT[file]):
        return False
    return not any(fnmatchcase(case, pattern) for pattern in LEFT_OUT.get(file, ()))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also the matrices and stresses that `make test` leaves out")
    parser.addoption("--limits", action="store_true", help="fail if a test or a file costs more than it may")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--all") or any("::" in argument for argument in config.args):
        return
    kept = [item for item in items if in_first_lane(item)]
    config.hook.pytest_deselected(items=[item for item in items if not in_first_lane(item)])
    items[:] = kept


def cpu_seconds() -> float:
    """CPU seconds of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    """Leave out fixtures of the session, which the first test that asks for them would pay for."""
    before = cpu_seconds()
    try:
        return (yield)
    finally:
        if fixturedef.scope == "session":
            stash = request.session.stash
            stash[SECONDS] = stash.get(SECONDS, 0.0) + cpu_seconds() - before


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool, bool]:
    item.session.stash[SECONDS] = 0.0
    item.stash[SECONDS] = cpu_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "teardown":
        seconds = cpu_seconds() - item.stash[SECONDS] - item.session.stash[SECONDS]
        report.user_properties.append(("cpu_seconds", seconds))
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "teardown":
        properties = dict(report.user_properties)
        seconds_of_tests[report.nodeid] = float(str(properties["cpu_seconds"]))


def over_limits() -> list[str]:
    """A line for each test and file of the first lane that costs more than it may."""
    files: defaultdict[str, float] = defaultdict(float)
    for name, seconds in seconds_of_tests.items():
        files[name.partition("::")[0]] += seconds
    tests = [(name, seconds, MOST_OF_A_TEST) for name, seconds in seconds_of_tests.items()]
    most_of_a_file = max(MOST_OF_A_FILE, SHARE_OF_A_FILE * sum(files.values()))
    of_files = [(name, seconds, most_of_a_file) for name, seconds in files.items()]
    return [
        f"{name}: {seconds:.1f} CPU seconds, {most:.0f} at most: make it cheaper, or name its cases in tests/lanes.py"
        for name, seconds, most in tests + of_files
        if seconds > most
    ]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--limits") and not hasattr(session.config, "workerinput") and over_limits():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("--limits"):
        for line in over_limits():
            terminalreporter.write_line(line, red=True)
    if config.getoption("--all"):
        terminalreporter.write_line("left out: slow tests (make test-slow); tests that need a GPU or the internet")
    else:
        terminalreporter.write_line("left out: matrices and stresses (make test-all, pytest --all)")
