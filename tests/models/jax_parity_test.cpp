// mmrec-jax on the CPU against the public code: by calls, blocks and every row too.
#include "tests/models/jax_parity.h"
#include "kernels/cpu/cpu.h"
#include "models/mmrec_jax/net.h"
#include "models/runtime/forward.h"

namespace mmrec::models {
namespace {

INSTANTIATE_TEST_SUITE_P(Cpu, JaxParity, testing::Values(JaxParityCase{"fp32", make_cpu_executor<mmrec_jax::Config>}),
                         jax_parity_name);

TEST_P(JaxParity, EveryRowAndEveryBlockOfACall) {
  const std::int64_t count = length("input_ids");
  mmrec_jax::Config cut = config();
  const std::int64_t layers = cut.num_layers;
  const mmrec_jax::HostWeights weights = load_weights(Checkpoint::open(folder()), cut);
  const std::vector<int> ids = slice("input_ids", 0, count);
  for (cut.num_layers = 1; cut.num_layers <= layers; ++cut.num_layers) {
    mmrec_jax::ModelView<kernels::Host> view = view_of(weights);
    view.layers.resize(static_cast<std::size_t>(cut.num_layers));
    kernels::Cpu cpu(1);
    mmrec_jax::Net<kernels::Cpu, float> net(cut, view, cpu, {.tokens = 256, .tile = 128, .rows = 1024});
    net.reserve(kBatch, false);
    kernels::HostBuffer<std::byte> slots(kBatch * net.slot_bytes());
    const Batch batch{.slot = slots.data(), .sequences = kBatch, .tokens = count, .ends = true};
    Done done;
    net.run({.tokens = ids.data(), .batches = {&batch, 1}, .rows = kBatch * count, .options = {}}, done);
    const std::string name = "block" + std::to_string(cut.num_layers - 1) + ".output";
    const std::vector<float>& want = reference_.at(name).values;
    ASSERT_LE(largest_difference(std::span(net.x(kBatch * count).data, want.size()), want), 5e-4) << name;
    if (cut.num_layers < layers) continue;
    std::vector<float> logits(static_cast<std::size_t>(kBatch * count * vocab_));
    const kernels::Linear<kernels::Host> head{
        .x = net.norm({.count = kBatch * count}), .weight = net.head(), .y = {logits.data(), kBatch * count, vocab_}};
    kernels::linear(cpu, {&head, 1});
    ASSERT_LE(largest_difference(logits, reference_.at("logits").values), 3e-4);
  }
}

}  // namespace
}  // namespace mmrec::models
