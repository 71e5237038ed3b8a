#include "apps/bench/options.h"

#include <array>

namespace mmrec::apps {
namespace {

constexpr std::string_view kHead = R"(mmrec-bench
mmrec-bench -m DIR --lengths 128,2048 --batches 1,8 --json > bench.json
mmrec-bench --synthetic 1024,12,32000 --device cuda --compare cpu

Measures load time, peak memory, prefill and decode, and the shares of the
device's bandwidth and matrix-product peak, measured in the same run.
)";

constexpr auto kOptions = std::to_array<Option>({
    {{"model", 'm'}, "DIR", "model folder (the bundled model)", true, "", Names::kInput},
    {{"synthetic"}, "D,L,V[,F]", "random bf16 model: width, layers, vocabulary, FFN", true},
    {{"arch"}, "NAME", "of --synthetic: its model_type (mmrec)", false, "mmrec mmrec100m mmrec-jax"},
    {{"keep"}, "DIR", "of --synthetic: write it there, or use the one that is there already", false, "", Names::kInput},
    {{"lengths"}, "N,...", "tokens per prefill (128,512,2048; GPU: 4096,32768)", true},
    {{"batches"}, "N,...", "sequences per prefill (1,4; GPU: 1)", true},
    {{"decode-batches"}, "N,...", "and per decode (the same; GPU: 1,2,4,8,64)", true},
    {{"decode"}, "N", "tokens per decode run (64; GPU: 256)", true},
    {{"documents"}, "N", "score N of 32 to 96 tokens, and one as long (64; 4096)", true},
    {{"requests"}, "N", "continue N prompts of 8 to 512 tokens (8; GPU: 2000)", true},
    {{"slots"}, "N", "so many of them at once, and as many in lock-step (4; GPU: 64)"},
    {{"repeat"}, "N", "runs of each (CPU: 3, the best; GPU: 5, the median)", true},
    {{"compare"}, "cpu", "measure the CPU first, for comparison", true, "cpu"},
    {{"json", 0, false}, "", "JSON, not a table", true},
    {{"output", 'o'}, "FILE", "write the result there, whole or not at all", true, "", Names::kOutput},
    {{"device"}, "D", "auto, cpu, cuda or cuda:N (GPU N, from 0)", true, "auto cpu cuda"},
    kPrecisionOption,
    kThreadsOption,
    kExpertOption,
    kPrefillOption,
    kSweepTolOption,
    {{"calls"}, "C", "of mmrec-jax: prompt, stepwise or whole", false, "prompt stepwise whole"},
    kBankOption,
    kHelpOption,
    kHelpAllOption,
    kVersionOption,
});
static_assert(names_are_complete(kOptions));

}  // namespace

std::span<const Option> bench_option_table() { return kOptions; }
std::string bench_help(bool all) { return help_page(kHead, kOptions, all); }

}  // namespace mmrec::apps
