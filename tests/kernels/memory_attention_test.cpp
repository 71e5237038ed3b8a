// memory_attention against float64 softmax attention: any head size, slots beyond a tile, large scores, aliasing.
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/simd.h"
#include "test_util.h"

namespace mmrec::kernels::test {
namespace {

struct Case {
  std::int64_t batch, time, heads, d, slots;
};

std::vector<double> reference(const Case& c, const std::vector<float>& q, const std::vector<float>& slots) {
  const std::int64_t dim = c.heads * c.d;
  const auto at = [](const std::vector<float>& x, std::int64_t i) {
    return static_cast<double>(x[static_cast<std::size_t>(i)]);
  };
  std::vector<double> out;
  for (std::int64_t r = 0; r < c.batch * c.time; ++r) {
    const std::int64_t b = r / c.time;
    for (std::int64_t head = 0; head < c.heads; ++head) {
      std::vector<double> score;
      double top = -1e300;
      for (std::int64_t j = 0; j < c.slots; ++j) {
        double dot = 0.0;
        for (std::int64_t i = 0; i < c.d; ++i) {
          dot += at(q, r * dim + head * c.d + i) * at(slots, (b * c.slots + j) * dim + head * c.d + i);
        }
        score.push_back(dot / std::sqrt(static_cast<double>(c.d)));
        top = std::max(top, score.back());
      }
      double sum = 0.0;
      for (double& s : score) sum += s = std::exp(s - top);
      for (std::int64_t i = 0; i < c.d; ++i) {
        double value = 0.0;
        for (std::int64_t j = 0; j < c.slots; ++j) {
          value += score[static_cast<std::size_t>(j)] / sum * at(slots, (b * c.slots + j) * dim + head * c.d + i);
        }
        out.push_back(value);
      }
    }
  }
  return out;
}

TEST(MemoryAttentionTest, MatchesFloat64) {
  for (const Case& c : {Case{1, 1, 1, 1, 1}, Case{2, 3, 4, 7, 1}, Case{1, 5, 8, 48, 2}, Case{3, 4, 2, 64, 31},
                        Case{2, 2, 3, 33, 32}, Case{1, 3, 1, 100, 33}, Case{2, 65, 8, 48, 7}, Case{1, 2, 2, 5, 257}}) {
    const std::int64_t dim = c.heads * c.d;
    const std::vector<float> q = random_floats(c.batch * c.time * dim, 1, -3.0F, 3.0F);
    const std::vector<float> slots = random_floats(c.batch * c.slots * dim, 2, -3.0F, 3.0F);
    const std::vector<double> expected = reference(c, q, slots);
    std::vector<float> first;
    for (const int threads : {1, 2, 5}) {
      Cpu cpu(threads);
      std::vector<float> out = poisoned(c.batch * c.time * dim);
      MemoryAttention<Host> op;
      op.q = {q.data(), c.batch, c.time, dim};
      op.slots = {slots.data(), c.batch, c.slots, dim};
      op.heads = c.heads;
      op.out = {out.data(), c.batch, c.time, dim};
      memory_attention(cpu, op);
      EXPECT_LT(max_error(out, expected), 1e-5) << c.heads << " heads of " << c.d << ", " << c.slots << " slots";
      if (first.empty()) first = out;
      EXPECT_TRUE(same_bits(out, first));
      std::vector<float> in_place = q;
      op.q = {in_place.data(), c.batch, c.time, dim};
      op.out = {in_place.data(), c.batch, c.time, dim};
      memory_attention(cpu, op);
      EXPECT_TRUE(same_bits(in_place, first)) << "in place";
    }
  }
}

TEST(MemoryAttentionTest, OneSlotIsCopiedExactly) {
  Cpu cpu(1);
  const std::vector<float> q = random_floats(96, 3);
  const std::vector<float> slot = random_floats(96, 4);
  std::vector<float> out = poisoned(96);
  memory_attention(
      cpu, {.q = {q.data(), 1, 1, 96}, .slots = {slot.data(), 1, 1, 96}, .heads = 4, .out = {out.data(), 1, 1, 96}});
  EXPECT_TRUE(same_bits(out, slot));
}

TEST(MemoryAttentionTest, EveryInstructionSetAlsoWithLargeScores) {
  for (const SimdKernels* table : supported_simd_kernels()) {
    for (const float scale : {1.0F, 100.0F}) {  // scores up to thousands: only differences may be exponentiated
      for (const std::int64_t slots : {1, 5, 32, 70}) {
        const Case c{1, 1, 1, 21, slots};
        const std::vector<float> q = random_floats(21, 5, -scale, scale);
        const std::vector<float> memory = random_floats(slots * 21, 6, -scale, scale);
        std::vector<float> values = poisoned(21);
        std::vector<float> out = poisoned(22);
        table->attention.attend(q.data(), memory.data(), 21, slots, 0, 21, 1.0F / std::sqrt(21.0F), values.data(),
                                out.data());
        EXPECT_TRUE(std::isnan(out.back()));
        out.pop_back();
        EXPECT_LT(max_error(out, reference(c, q, memory)), scale * (scale > 1.0F ? 2e-3 : 1e-6)) << table->name;
      }
    }
  }
}

}  // namespace
}  // namespace mmrec::kernels::test
