// Reading, checking and writing sentencepiece's ModelProto.
#include "engine/tokenizer/sentencepiece_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <stdexcept>
#include <unordered_set>

#include "engine/tokenizer/charsmap.h"
#include "models/files/text.h"
#include "models/files/utf8.h"

namespace mmrec::engine {
namespace {

using models::quote;

enum class Wire : std::uint8_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

/// One field of a protobuf message; `number` holds varints and fixed ones, `bytes` the rest.
struct Field {
  std::uint32_t id = 0;
  Wire wire = Wire::kVarint;
  std::uint64_t number = 0;
  std::string_view bytes;
};

/// Reads a message field by field; every length is compared with what is left.
class WireReader {
 public:
  WireReader(std::string_view bytes, const std::string& name, const char* message)
      : rest_(bytes), name_(name), message_(message) {}

  bool next(Field& field) {
    if (rest_.empty()) return false;
    const std::uint64_t tag = varint();
    const std::uint64_t id = tag >> 3;
    if (id < 1 || id > (1U << 29) - 1) fail(fmt::format("field number {}, expected 1..536870911", id));
    field = {static_cast<std::uint32_t>(id), static_cast<Wire>(tag & 7U), 0, {}};
    switch (field.wire) {
      case Wire::kVarint:
        return field.number = varint(), true;
      case Wire::kFixed64:
        return field.number = fixed(8), true;
      case Wire::kFixed32:
        return field.number = fixed(4), true;
      case Wire::kBytes:
        break;
      default:
        fail(fmt::format("field {} has wire type {}, expected 0, 1, 2 or 5", id, tag & 7U));
    }
    const std::uint64_t length = varint();
    if (length > rest_.size()) fail(fmt::format("field {} of {} bytes, {} are left", id, length, rest_.size()));
    field.bytes = rest_.substr(0, length);
    rest_.remove_prefix(length);
    return true;
  }

  std::string_view bytes(const Field& field) const { return expect(field, Wire::kBytes).bytes; }
  std::uint64_t varint(const Field& field) const { return expect(field, Wire::kVarint).number; }
  bool boolean(const Field& field) const { return varint(field) != 0; }
  float real(const Field& field) const {
    return std::bit_cast<float>(static_cast<std::uint32_t>(expect(field, Wire::kFixed32).number));
  }
  std::string text(const Field& field) const {
    const std::string_view value = bytes(field);
    if (value.size() > kMaxTokenBytes || !models::is_valid_utf8(value) || value.find('\0') != std::string_view::npos) {
      fail(fmt::format("field {} is {}, expected UTF-8 without NUL of at most {} bytes", field.id, quote(value),
                       kMaxTokenBytes));
    }
    return std::string(value);
  }

  [[noreturn]] void fail(const std::string& what) const {
    throw std::runtime_error(fmt::format("{}: not a sentencepiece model: {}: {}", name_, message_, what));
  }

 private:
  const Field& expect(const Field& field, Wire wire) const {
    if (field.wire != wire) {
      fail(fmt::format("field {} has wire type {}, expected {}", field.id, static_cast<int>(field.wire),
                       static_cast<int>(wire)));
    }
    return field;
  }

  std::uint64_t varint() {
    std::uint64_t value = 0;
    for (unsigned i = 0; i < 10; ++i) {
      if (rest_.empty()) fail("ends inside a number");
      const auto byte = static_cast<unsigned char>(rest_.front());
      rest_.remove_prefix(1);
      if (i == 9 && byte > 1) break;
      value |= std::uint64_t{byte & 0x7FU} << (7 * i);
      if (byte < 0x80) return value;
    }
    fail("number of more than 64 bits");
  }

  std::uint64_t fixed(unsigned bytes) {
    if (rest_.size() < bytes) fail("ends inside a number");
    std::uint64_t value = 0;
    for (unsigned i = 0; i < bytes; ++i) value |= std::uint64_t{static_cast<unsigned char>(rest_[i])} << (8 * i);
    rest_.remove_prefix(bytes);
    return value;
  }

  std::string_view rest_;
  const std::string& name_;
  const char* message_;
};

/// Parses and checks; members are the file's and what is needed only while reading.
class Parser {
 public:
  explicit Parser(const std::string& name) : name_(name) {}

  SentencePieceFile run(std::string_view bytes) {
    // Fields that are not named here, such as self-test data or how it was trained, are not used.
    for_each_field(bytes, "ModelProto", [&](const WireReader& in, const Field& field) {
      if (field.id == 1) {
        if (file_.pieces.size() == kMaxTokens) fail(fmt::format("more than {} pieces", kMaxTokens));
        read_piece(in.bytes(field));
      } else if (field.id == 2) {
        read_trainer_spec(in.bytes(field));
      } else if (field.id == 3) {
        read_normalizer_spec(in.bytes(field));
      }
    });
    check();
    return std::move(file_);
  }

 private:
  [[noreturn]] void fail(const std::string& what) const { throw std::runtime_error(name_ + ": " + what); }
  [[noreturn]] void fail(std::size_t piece, const std::string& what) const {
    fail(fmt::format("piece {}: {}", piece, what));
  }

  template <class Visit>
  void for_each_field(std::string_view bytes, const char* message, const Visit& visit) const {
    WireReader in(bytes, name_, message);
    for (Field field; in.next(field);) visit(in, field);
  }

  void read_piece(std::string_view bytes) {
    const std::size_t index = file_.pieces.size();
    Piece& piece = file_.pieces.emplace_back();
    for_each_field(bytes, "SentencePiece", [&](const WireReader& in, const Field& field) {
      if (field.id == 1) {
        piece.text = in.bytes(field);
        if (piece.text.size() > kMaxTokenBytes) {
          fail(index, fmt::format("found {} bytes, expected at most {}", piece.text.size(), kMaxTokenBytes));
        }
      } else if (field.id == 2) {
        piece.score = in.real(field);
      } else if (field.id == 3) {
        const std::uint64_t type = in.varint(field);
        if (type < 1 || type > 6) fail(index, fmt::format("found type {}, expected 1..6", type));
        piece.type = static_cast<PieceType>(type);
      }
    });
  }

  void read_trainer_spec(std::string_view bytes) {
    for_each_field(bytes, "TrainerSpec", [&](const WireReader& in, const Field& field) {
      if (field.id == 3) {
        const std::uint64_t type = in.varint(field);
        if (type < 1 || type > 4) fail(fmt::format("found model_type {}, expected 1..4", type));
        file_.model_type = static_cast<int>(type);
      } else if (field.id == 24 && in.boolean(field)) {
        fail("treat_whitespace_as_suffix is set, expected white space to begin words");
      } else if (field.id == 35) {
        file_.byte_fallback = in.boolean(field);
      } else if (field.id == 44 || field.id == 46 || field.id == 47) {
        (field.id == 44 ? file_.unk_surface : field.id == 46 ? bos_piece_ : eos_piece_) = in.text(field);
      }
    });
  }

  void read_normalizer_spec(std::string_view bytes) {
    for_each_field(bytes, "NormalizerSpec", [&](const WireReader& in, const Field& field) {
      if (field.id == 2) file_.charsmap = in.bytes(field);
      if (field.id == 3) file_.add_dummy_prefix = in.boolean(field);
      if (field.id == 4) file_.remove_extra_whitespaces = in.boolean(field);
      if (field.id == 5) file_.escape_whitespaces = in.boolean(field);
    });
  }

  void check() {
    if (file_.pieces.empty()) fail("not a sentencepiece model: found no pieces");
    std::unordered_set<std::string_view> texts;
    texts.reserve(file_.pieces.size());
    std::vector<std::string_view> user_defined;
    std::size_t byte_pieces = 0;
    for (std::size_t i = 0; i < file_.pieces.size(); ++i) {
      const Piece& piece = file_.pieces[i];
      if (piece.text.empty()) fail(i, "found an empty piece");
      if (piece.text.find('\0') != std::string::npos || !models::is_valid_utf8(piece.text)) {
        fail(i, fmt::format("found {}, expected UTF-8 without NUL", quote(piece.text)));
      }
      if (!std::isfinite(piece.score)) fail(i, fmt::format("found score {}, expected a finite number", piece.score));
      if (!texts.insert(piece.text).second) fail(i, fmt::format("{} occurs twice", quote(piece.text)));
      if (piece.type == PieceType::kUnknown) {
        if (file_.unk_id >= 0) fail(i, fmt::format("a second unknown piece, the first is {}", file_.unk_id));
        file_.unk_id = static_cast<int>(i);
      } else if (piece.type == PieceType::kControl) {
        if (piece.text == bos_piece_) file_.bos_id = static_cast<int>(i);
        if (piece.text == eos_piece_) file_.eos_id = static_cast<int>(i);
      } else if (piece.type == PieceType::kUserDefined) {
        user_defined.push_back(piece.text);
      } else if (piece.type == PieceType::kByte) {
        if (byte_of_piece(piece.text) < 0) {
          fail(i, fmt::format("found byte piece {}, expected <0x00>..<0xFF>", quote(piece.text)));
        }
        ++byte_pieces;
      }
    }
    if (file_.unk_id < 0) fail("found no unknown piece, expected one");
    if (const std::size_t expected = file_.byte_fallback ? 256 : 0; byte_pieces != expected) {
      fail(fmt::format("found {} byte pieces, expected {} as byte_fallback says", byte_pieces, expected));
    }
    check_user_defined(std::move(user_defined));
    check_charsmap(file_.charsmap, name_);
  }

  /// Sorted, a symbol comes right after those that begin it.
  void check_user_defined(std::vector<std::string_view> symbols) const {
    if (symbols.size() > kMaxUserDefined) {
      fail(fmt::format("found {} user-defined symbols, expected at most {}", symbols.size(), kMaxUserDefined));
    }
    std::ranges::sort(symbols);
    std::vector<std::string_view> prefixes;
    for (const std::string_view symbol : symbols) {
      while (!prefixes.empty() && !symbol.starts_with(prefixes.back())) prefixes.pop_back();
      prefixes.push_back(symbol);
      if (prefixes.size() > kMaxNestedUserDefined) {
        fail(fmt::format("more than {} user-defined symbols begin {}", kMaxNestedUserDefined, quote(symbol)));
      }
    }
  }

  const std::string& name_;
  SentencePieceFile file_;
  std::string bos_piece_ = "<s>";
  std::string eos_piece_ = "</s>";
};

class WireWriter {
 public:
  void varint(std::uint32_t id, std::uint64_t value) {
    put(std::uint64_t{id} << 3);
    put(value);
  }
  void real(std::uint32_t id, float value) {
    put((std::uint64_t{id} << 3) | 5);
    const auto bits = std::bit_cast<std::uint32_t>(value);
    for (unsigned i = 0; i < 4; ++i) out_.push_back(static_cast<char>((bits >> (8 * i)) & 0xFFU));
  }
  void bytes(std::uint32_t id, std::string_view value) {
    put((std::uint64_t{id} << 3) | 2);
    put(value.size());
    out_.append(value);
  }
  const std::string& str() const { return out_; }

 private:
  void put(std::uint64_t value) {
    for (; value >= 0x80; value >>= 7) out_.push_back(static_cast<char>(value | 0x80));
    out_.push_back(static_cast<char>(value));
  }
  std::string out_;
};

}  // namespace

int byte_of_piece(std::string_view piece) {
  const auto digit = [](char c) { return c >= '0' && c <= '9' ? c - '0' : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1; };
  if (piece.size() != 6 || !piece.starts_with("<0x") || piece[5] != '>') return -1;
  const int high = digit(piece[3]);
  const int low = digit(piece[4]);
  return high < 0 || low < 0 ? -1 : 16 * high + low;
}

SentencePieceFile parse_sentencepiece(std::string_view bytes, const std::string& name) {
  return Parser(name).run(bytes);
}

std::string serialize(const SentencePieceFile& file, bool add_dummy_prefix) {
  WireWriter out;
  for (const Piece& piece : file.pieces) {
    WireWriter message;
    message.bytes(1, piece.text);
    message.real(2, piece.score);
    message.varint(3, static_cast<std::uint64_t>(piece.type));
    out.bytes(1, message.str());
  }
  WireWriter trainer;
  trainer.varint(3, static_cast<std::uint64_t>(file.model_type));
  trainer.varint(35, file.byte_fallback ? 1 : 0);
  trainer.bytes(45, file.pieces[static_cast<std::size_t>(file.unk_id)].text);
  out.bytes(2, trainer.str());
  WireWriter normalizer;
  if (!file.charsmap.empty()) normalizer.bytes(2, file.charsmap);
  normalizer.varint(3, add_dummy_prefix ? 1 : 0);
  normalizer.varint(4, file.remove_extra_whitespaces ? 1 : 0);
  normalizer.varint(5, file.escape_whitespaces ? 1 : 0);
  out.bytes(3, normalizer.str());
  return out.str();
}

}  // namespace mmrec::engine
