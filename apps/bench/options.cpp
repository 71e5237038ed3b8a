// The command line of mmrec-bench: its options and their help.
#include <array>

#include "apps/common/arguments.h"

namespace mmrec::apps {
namespace {

constexpr std::string_view kHead = R"(mmrec-bench
mmrec-bench -m DIR --lengths 128,2048 --batches 1,8 --json > bench.json
mmrec-bench --synthetic 1024,12,32000 --device cuda --compare cpu

Measures load time, peak memory, prefill and decode, and the shares of the
device's bandwidth and matrix-product peak, measured in the same run.
)";

constexpr auto kOptions = std::to_array<Option>({
    {"model", 'm', kModelFolder, "model folder (the bundled model)", true},
    {"synthetic", 0, {"D,L,V[,F]"}, "random bf16 model: width, layers, vocabulary, FFN", true},
    {"arch", 0, {"NAME", "mmrec mmrec100m mmrec-jax"}, "of --synthetic: its model_type (mmrec)"},
    {"keep", 0, kModelFolder, "of --synthetic: write it there, or use the one that is there already"},
    {"lengths", 0, {"N,..."}, "tokens per prefill (128,512,2048; GPU: 4096,32768)", true},
    {"batches", 0, {"N,..."}, "sequences per prefill (1,4; GPU: 1)", true},
    {"decode-batches", 0, {"N,..."}, "and per decode (the same; GPU: 1,2,4,8,64)", true},
    {"decode", 0, {"N"}, "tokens per decode run and prompt of --offline (64; 256)", true},
    {"documents", 0, {"N"}, "score N of 32 to 96 tokens, and one as long (64; 4096)", true},
    {"requests", 0, {"N"}, "continue N prompts of 8 to 512 tokens (8; GPU: 2000)", true},
    {"slots", 0, {"N"}, "so many of them at once, and as many in lock-step (4; GPU: 64)"},
    {"offline", 0, {"N"}, "continue N such prompts by mmrec-generate (0: none)", true},
    {"repeat", 0, {"N"}, "runs of each (CPU: 3, the best; GPU: 5, the median)", true},
    {"compare", 0, {"cpu", "cpu"}, "measure the CPU first, for comparison", true},
    {"json", 0, kNoValue, "JSON, not a table", true},
    {"output", 'o', kOutputFile, "write the result there, whole or not at all", true},
    {"device", 0, {"D", "auto cpu cuda"}, "auto, cpu, cuda or cuda:N (GPU N, from 0)", true},
    kPrecisionOption,
    kBatchInvariantOption,
    kThreadsOption,
    kExpertOption,
    kPrefillOption,
    kSweepTolOption,
    {"calls", 0, {"C", "prompt stepwise whole"}, "of mmrec-jax: prompt, stepwise or whole"},
    kBankOption,
    kHelpOption,
    kHelpAllOption,
    kVersionOption,
});

}  // namespace

const Program& bench_program();  // as the list of programs() declares it
const Program& bench_program() {
  static constexpr Program kProgram = {.name = "mmrec-bench",
                                       .does = "measure an MM-Rec model against what the machine can do",
                                       .operands = "",
                                       .head = kHead,
                                       .options = kOptions};
  return kProgram;
}

}  // namespace mmrec::apps
