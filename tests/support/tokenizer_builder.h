// Sentencepiece model files put together by hand, good and bad.
#pragma once

#include <bit>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace mmrec::test {

/// A protobuf message, field by field.
class ProtoBuilder {
 public:
  ProtoBuilder& varint(std::uint64_t id, std::uint64_t value) {
    put(id << 3);
    put(value);
    return *this;
  }
  ProtoBuilder& real(std::uint64_t id, float value) {
    put((id << 3) | 5);
    append(std::bit_cast<std::uint32_t>(value), 4);
    return *this;
  }
  ProtoBuilder& bytes(std::uint64_t id, std::string_view value) {
    put((id << 3) | 2);
    put(value.size());
    out_ += value;
    return *this;
  }
  ProtoBuilder& raw(std::string_view bytes) {
    out_ += bytes;
    return *this;
  }
  const std::string& str() const { return out_; }

 private:
  void put(std::uint64_t value) {
    for (; value >= 0x80; value >>= 7) out_ += static_cast<char>(value | 0x80);
    out_ += static_cast<char>(value);
  }
  void append(std::uint64_t value, int bytes) {
    for (int i = 0; i < bytes; ++i) out_ += static_cast<char>(value >> (8 * i));
  }
  std::string out_;
};

/// Normalisation rules: what is replaced, and by what.
using Rules = std::map<std::string, std::string>;

/// A double-array trie of normalisation rules: every node has a block of 256 units of its own, its base.
class CharsmapBuilder {
 public:
  static constexpr std::uint32_t kNever = 0x80000000;  // a unit no byte leads to

  explicit CharsmapBuilder(const Rules& rules) : units_(512, kNever) {
    units_[0] = 256U << 10;  // the root: base 256
    for (const auto& [key, replacement] : rules) {
      std::uint32_t base = 256;
      for (std::size_t i = 0; i < key.size(); ++i) {
        const std::uint32_t at = base ^ static_cast<unsigned char>(key[i]);
        if (units_[at] == kNever) {
          const auto next = static_cast<std::uint32_t>(units_.size());
          units_.resize(units_.size() + 256, kNever);
          units_[at] = ((at ^ next) << 10) | static_cast<unsigned char>(key[i]);
        }
        base = at ^ (units_[at] >> 10);
        if (i + 1 == key.size()) {
          units_[at] |= 1U << 8;
          units_[base] = kNever | static_cast<std::uint32_t>(replacements_.size());
        }
      }
      replacements_ += replacement;
      replacements_ += '\0';
    }
  }

  std::vector<std::uint32_t>& units() { return units_; }

  std::string build() const {
    std::string blob;
    const auto put = [&](std::uint32_t x) {
      for (int i = 0; i < 4; ++i) blob += static_cast<char>(x >> (8 * i));
    };
    put(static_cast<std::uint32_t>(4 * units_.size()));
    for (const std::uint32_t unit : units_) put(unit);
    return blob + replacements_;
  }

 private:
  std::vector<std::uint32_t> units_;
  std::string replacements_;
};

/// A tokenizer.model. Types: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte.
struct TokenizerBuilder {
  struct Piece {
    std::string text;
    float score = 0.0F;
    int type = 1;
  };
  std::vector<Piece> pieces = {{"<unk>", 0.0F, 2}, {"<s>", 0.0F, 3}, {"</s>", 0.0F, 3}};
  int model_type = 1;  // 1 unigram, 2 BPE
  bool byte_fallback = false;
  bool add_dummy_prefix = true;
  bool remove_extra_whitespaces = false;
  std::string charsmap;
  ProtoBuilder extra_trainer, extra_normalizer, extra;  // further fields

  /// Pieces scored by falling preference, in quarters: sums of many of them are exact in fp32.
  TokenizerBuilder& words(const std::vector<std::string>& texts) {
    for (const std::string& text : texts) pieces.push_back({text, -0.25F * static_cast<float>(pieces.size()), 1});
    return *this;
  }
  TokenizerBuilder& bytes() {
    byte_fallback = true;
    const char* digits = "0123456789ABCDEF";
    for (int b = 0; b < 256; ++b) {
      pieces.push_back({std::string("<0x") + digits[b / 16] + digits[b % 16] + ">", 0.0F, 6});
    }
    return *this;
  }
  std::string build() const {
    ProtoBuilder out;
    for (const Piece& p : pieces) {
      out.bytes(1,
                ProtoBuilder().bytes(1, p.text).real(2, p.score).varint(3, static_cast<std::uint64_t>(p.type)).str());
    }
    ProtoBuilder trainer;
    trainer.varint(3, static_cast<std::uint64_t>(model_type))
        .varint(35, byte_fallback ? 1 : 0)
        .raw(extra_trainer.str());
    out.bytes(2, trainer.str());
    ProtoBuilder normalizer;
    normalizer.bytes(1, "custom").bytes(2, charsmap).varint(3, add_dummy_prefix ? 1 : 0);
    normalizer.varint(4, remove_extra_whitespaces ? 1 : 0).raw(extra_normalizer.str());
    out.bytes(3, normalizer.str());
    return out.raw(extra.str()).str();
  }
};

}  // namespace mmrec::test
