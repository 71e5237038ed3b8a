// PCRE2 as patterns for tiktoken expect it: UTF-8 with Unicode properties, '$' at the end of the text only, \n alone
// ends lines, \s is White_Space. \w and \b keep PCRE2's meaning. Matching is limited in steps, depth and memory: a
// hostile pattern ends in an error.
#include "engine/tokenizer/split_pattern.h"

#define PCRE2_CODE_UNIT_WIDTH 8  // before pcre2.h
#include <fmt/format.h>
#include <pcre2.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <new>
#include <stdexcept>
#include <utility>

#include "models/files/text.h"

namespace mmrec::engine {
namespace {

constexpr std::uint32_t kMatchLimit = 4'000'000;  // steps of one match, and
constexpr std::uint32_t kStepsPerByte = 8;        // of the text: a run of white space takes some a byte
constexpr std::uint32_t kDepthLimit = 100'000;
constexpr std::uint32_t kHeapLimit = std::uint32_t{64} << 10;  // KiB
constexpr std::size_t kJitStackStart = std::size_t{32} << 10;
constexpr std::size_t kJitStackMost = std::size_t{1} << 20;

template <class T, void (*kFree)(T*)>
struct Freed {
  void operator()(T* pointer) const { kFree(pointer); }
};
template <class T, void (*kFree)(T*)>
using Owned = std::unique_ptr<T, Freed<T, kFree>>;
using OwnedCode = Owned<pcre2_code, pcre2_code_free>;
using OwnedCompileContext = Owned<pcre2_compile_context, pcre2_compile_context_free>;
using OwnedMatchContext = Owned<pcre2_match_context, pcre2_match_context_free>;
using OwnedMatchData = Owned<pcre2_match_data, pcre2_match_data_free>;
using OwnedJitStack = Owned<pcre2_jit_stack, pcre2_jit_stack_free>;

template <class Pointer>
Pointer not_null(Pointer pointer) {
  if (!pointer) throw std::bad_alloc();
  return pointer;
}

std::string message_of(int code) {
  std::array<PCRE2_UCHAR, 256> text{};
  pcre2_get_error_message(code, text.data(), text.size());
  return reinterpret_cast<const char*>(text.data());
}

// Both end with a range: a hyphen after it means itself, as after \s.
constexpr std::string_view kWhiteSpace =
    R"(\x{20}\x{85}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}\x{9}-\x{D})";
constexpr std::string_view kNoWhiteSpace =
    R"(\x{0}-\x{8}\x{E}-\x{1F}\x{21}-\x{84}\x{86}-\x{9F}\x{A1}-\x{167F}\x{1681}-\x{1FFF}\x{200B}-\x{2027})"
    R"(\x{202A}-\x{202E}\x{2030}-\x{205E}\x{2060}-\x{2FFF}\x{3001}-\x{10FFFF})";

}  // namespace

std::string with_unicode_white_space(std::string_view pattern) {
  std::string out;
  bool in_class = false;
  for (std::size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i];
    if (c == '\\' && i + 1 < pattern.size()) {
      const char escaped = pattern[++i];
      if (escaped == 'Q') {  // quotes up to \E
        const std::size_t end = std::min(pattern.find("\\E", i), pattern.size());
        out.append(pattern, i - 1, end - i + 1);
        i = end - 1;
      } else if (escaped == 's' || escaped == 'S') {
        if (!in_class) out += '[';
        out += escaped == 's' ? kWhiteSpace : kNoWhiteSpace;
        if (!in_class) out += ']';
      } else {
        out += c;
        out += escaped;
      }
      continue;
    }
    if (c == '[' && !in_class) {
      in_class = true;
      out += c;
      if (i + 1 < pattern.size() && pattern[i + 1] == '^') out += pattern[++i];
      if (i + 1 < pattern.size() && pattern[i + 1] == ']') out += pattern[++i];  // one that is meant
      continue;
    }
    if (c == ']') in_class = false;
    if (c == '[' && in_class && i + 1 < pattern.size() && pattern[i + 1] == ':') {  // [:alpha:]
      const std::size_t end = pattern.find(":]", i + 2);
      if (end != std::string_view::npos) {
        out.append(pattern, i, end + 2 - i);
        i = end + 1;
        continue;
      }
    }
    out += c;
  }
  return out;
}

struct SplitPattern::Code {
  OwnedCode code;
};

SplitPattern::SplitPattern(std::string_view pattern, const std::string& name) {
  const std::string adapted = with_unicode_white_space(pattern);
  const OwnedCompileContext context = not_null(OwnedCompileContext(pcre2_compile_context_create(nullptr)));
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  int fault = 0;
  PCRE2_SIZE at = 0;
  constexpr std::uint32_t kOptions = PCRE2_UTF | PCRE2_UCP | PCRE2_DOLLAR_ENDONLY | PCRE2_NEVER_BACKSLASH_C;
  OwnedCode code(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(adapted.data()), adapted.size(), kOptions, &fault, &at,
                               context.get()));
  if (!code) {
    if (fault == 121) throw std::bad_alloc();  // "failed to allocate heap memory"
    throw std::runtime_error(fmt::format("{}: pattern: found {}, expected a regular expression: {}", name,
                                         models::quote(pattern), message_of(fault)));
  }
  (void)pcre2_jit_compile(code.get(), PCRE2_JIT_COMPLETE);  // where it fails the interpreter matches
  code_ = std::make_shared<const Code>(Code{std::move(code)});
}

std::size_t SplitPattern::split(std::string_view text, std::size_t at, std::size_t end,
                                const std::function<void(std::string_view)>& piece) const {
  const pcre2_code* code = code_->code.get();
  const OwnedMatchData found = not_null(OwnedMatchData(pcre2_match_data_create(1, nullptr)));
  const OwnedMatchContext context = not_null(OwnedMatchContext(pcre2_match_context_create(nullptr)));
  constexpr std::size_t kMost = std::numeric_limits<std::uint32_t>::max();
  pcre2_set_match_limit(context.get(),
                        static_cast<std::uint32_t>(std::min(kMatchLimit + kStepsPerByte * text.size(), kMost)));
  pcre2_set_depth_limit(context.get(), kDepthLimit);
  pcre2_set_heap_limit(context.get(), kHeapLimit);
  const OwnedJitStack stack(pcre2_jit_stack_create(kJitStackStart, kJitStackMost, nullptr));  // null: JIT is absent
  if (stack) pcre2_jit_stack_assign(context.get(), nullptr, stack.get());

  const auto subject = reinterpret_cast<PCRE2_SPTR>(text.data());
  constexpr std::uint32_t kOptions = PCRE2_NO_UTF_CHECK | PCRE2_NOTEMPTY;
  const PCRE2_SIZE* match = pcre2_get_ovector_pointer(found.get());
  while (at < std::min(end, text.size())) {
    int count = pcre2_match(code, subject, text.size(), at, kOptions, found.get(), context.get());
    if (count == PCRE2_ERROR_JIT_STACKLIMIT) {
      count = pcre2_match(code, subject, text.size(), at, kOptions | PCRE2_NO_JIT, found.get(), context.get());
    }
    if (count == PCRE2_ERROR_NOMATCH) {
      piece(text.substr(at));
      return text.size();
    }
    if (count == PCRE2_ERROR_NOMEMORY) throw std::bad_alloc();
    if (count < 0) {
      throw std::runtime_error(
          fmt::format("the tokenizer's pattern cannot cut the text at byte {}: {}", at, message_of(count)));
    }
    const std::size_t match_begin = match[0];
    const std::size_t match_end = match[1];
    if (match_begin < at || match_end <= match_begin) {  // \K and the like
      throw std::runtime_error(
          fmt::format("the tokenizer's pattern cannot cut the text at byte {}: it matches bytes {} to {}", at,
                      match_begin, match_end));
    }
    if (match_begin > at) piece(text.substr(at, match_begin - at));
    piece(text.substr(match_begin, match_end - match_begin));
    at = match_end;
  }
  return at;
}

}  // namespace mmrec::engine
