// The precompiled_charsmap of a sentencepiece model: text normalisation rules in a Darts double-array trie.
//
//   u32 trie bytes, little-endian | trie units, u32 each | replacements, NUL-terminated
//
// sentencepiece follows the trie's offsets without looking where they lead and keeps at most 32 matches of one lookup
// in an array on its stack, so this check is what stands between a crafted file and memory it must not read.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace mmrec::engine {

/// Throws std::runtime_error beginning with `name` unless every lookup of every text stays inside the trie, ends,
/// matches at most 32 rules, and finds replacements that are short valid UTF-8. An empty blob (no rules) is valid.
void check_charsmap(std::string_view blob, const std::string& name);

/// What the rule for the one byte `key` replaces it by; nothing if there is no such rule. Requires: checked.
std::optional<std::string_view> charsmap_replacement(std::string_view blob, unsigned char key);

}  // namespace mmrec::engine
