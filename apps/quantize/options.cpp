// The command line of mmrec-quantize: its options and their help.
#include <array>

#include "apps/common/arguments.h"

namespace mmrec::apps {
namespace {

constexpr std::string_view kHead = R"(mmrec-quantize DIR OUT --format int8
mmrec-quantize DIR OUT --format int4 --group 64 --keep "blocks.0.*"

Writes the model of folder DIR with smaller weights to the new folder OUT. A
table on stdout tells the error of each matrix and what it takes.
)";

constexpr auto kOptions = std::to_array<Option>({
    {"format",
     0,
     {"F", "int8 int4 fp8"},
     "int8 or fp8, a scale per row; or int4, a scale per group; matrices that do not bear these get int8",
     true},
    {"group", 0, {"N"}, "weights that share a scale of int4: a multiple of 64 (64)", true},
    {"keep", 0, {"PATTERN"}, "matrices that stay as they are, by name; may be repeated", true, {}, true},
    {"calibrate", 0, kInputFile, "a text: round so that products with its activations change little", true},
    {"eval", 0, kInputFile, "a text: perplexity before and after, as mmrec-ppl tells it", true},
    {"device", 0, {"D", "auto cpu cuda"}, "of --eval: auto, cpu, cuda or cuda:N (GPU N, from 0)"},
    kPrecisionOption,
    kThreadsOption,
    kQuietOption,
    kHelpOption,
    kHelpAllOption,
    kVersionOption,
});

}  // namespace

const Program& quantize_program();  // as the list of programs() declares it
const Program& quantize_program() {
  static constexpr Program kProgram = {.name = "mmrec-quantize",
                                       .does = "make the weights of an MM-Rec model smaller",
                                       .operands = "DIR OUT",
                                       .head = kHead,
                                       .options = kOptions};
  return kProgram;
}

}  // namespace mmrec::apps
