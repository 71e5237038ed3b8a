// mmrec.Tokenizer and mmrec.StreamDecoder.
#include <nanobind/nanobind.h>
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <deque>

#include "engine/python/src/binding.h"
#include "mmrec/evaluation.h"

namespace mmrec::python {
namespace {

PyTokenizer load(nb::handle path) {
  const std::filesystem::path file = model_path(path);
  return without_gil([&] { return PyTokenizer{Tokenizer::load(file), file}; });
}

nb::object encode(const PyTokenizer& self, nb::handle value, bool add_bos) {
  const std::string_view text = text_of(value, "text");
  return array_of(without_gil([&] {
    return self.tokenizer.encode(text, add_bos, [watch = SignalWatch()](std::size_t) mutable {
      watch.check();
      return true;
    });
  }));
}

nb::list encode_texts(const PyTokenizer& self, nb::handle texts, bool add_bos, bool has_prefix, nb::handle threads) {
  const int count = integer_of<int>(threads, "threads");
  if (nb::isinstance<nb::str>(texts) || nb::isinstance<nb::bytes>(texts)) {
    refuse_type("texts", "found one text, expected an iterable of texts");
  }
  constexpr std::size_t kBytesOfATurn = std::size_t{4} << 20;  // then it looks for signals
  const nb::list all(nb::borrow(texts));
  std::vector<std::string_view> views;
  for (const nb::handle text : all) {
    views.push_back(text_of(text, ("text " + std::to_string(views.size())).c_str()));
  }
  nb::list result;
  for (std::size_t begin = 0, end = 0; begin < views.size(); begin = end) {
    for (std::size_t bytes = 0; end < views.size() && bytes < kBytesOfATurn; ++end) bytes += views[end].size();
    const auto turn = std::span(views).subspan(begin, end - begin);
    for (std::vector<int>& one : without_gil([&] { return self.tokenizer.encode_batch(turn, add_bos, count); })) {
      result.append(array_of(has_prefix ? with_prefix(self.tokenizer, std::move(one)) : std::move(one)));
    }
    if (PyErr_CheckSignals() != 0) nb::raise_python_error();
  }
  return result;
}

nb::list pairs_of(const PyTokenizer& self, nb::handle pairs, bool add_bos, std::int64_t max_length, int threads) {
  std::deque<std::string> texts;
  std::vector<TextPair> views;
  for (const nb::handle pair : nb::iter(pairs)) {
    const auto [context, continuation] = nb::cast<std::pair<nb::object, nb::object>>(pair);
    std::string& text = texts.emplace_back(text_of(context, "context"));
    const std::size_t size = text.size();
    views.push_back({text.append(text_of(continuation, "continuation")), size});
  }
  nb::list result;
  for (PairTokens& one :
       without_gil([&] { return encode_pairs(self.tokenizer, views, add_bos, max_length, threads); })) {
    result.append(nb::make_tuple(array_of(std::move(one.ids)), one.context));
  }
  return result;
}

std::string decode(const PyTokenizer& self, nb::handle value) {
  return without_gil([&self, ids = row_of(value, "tokens")] { return self.tokenizer.decode(ids); });
}

nb::bytes piece_bytes(const PyTokenizer& self, nb::handle token) {
  const std::string piece = self.tokenizer.piece(integer_of<int>(token, "token"));
  return nb::bytes(piece.data(), piece.size());
}

}  // namespace

void bind_tokenizer(nb::module_& m) {
  nb::class_<PyTokenizer> type(m, "Tokenizer",
                               "A sentencepiece model or a tiktoken rank file. Immutable; threads may share it.\n\n"
                               "Pickled by path.");
  type.def_static(
      "load", load, nb::call_guard<Call>(), nb::arg("path") = nb::none(),
      "Loads tokenizer.model or tokenizer.tiktoken of a model folder, or the file itself, with\n"
      "tokenizer_config.json beside it if there is one. None: the bundled model's. Raises ModelError naming\n"
      "file, found and expected, and OSError.");
  type.def("encode", encode, nb::call_guard<Call>(), nb::arg("text"), nb::arg("add_bos") = true,
           "Ids of `text` (str, or bytes of UTF-8), int32 [T]. BOS is first if add_bos and adds_bos. Invalid UTF-8\n"
           "becomes U+FFFD; special tokens are never recognised in the text.");
  type.def(
      "encode_batch",
      [](const PyTokenizer& self, nb::handle texts, bool add_bos, nb::handle threads) {
        return encode_texts(self, texts, add_bos, false, threads);
      },
      nb::call_guard<Call>(), nb::arg("texts"), nb::arg("add_bos") = true, nb::arg("threads") = 0,
      "A list of the ids of each of `texts` (an iterable of str or bytes), as encode() gives them, by `threads` of\n"
      "the CPU (0: all the processors this process may use). Raises ValueError for `threads` < 0.");
  type.def(
      "decode", decode, nb::call_guard<Call>(), nb::arg("tokens"),
      "Text of ids [T]. Control tokens vanish; bytes that are no UTF-8 become U+FFFD. Raises IndexError for an id\n"
      "outside [0, vocab_size).");
  type.def(
      "piece",
      [](const PyTokenizer& self, nb::handle token) {
        return piece_bytes(self, token).attr("decode")("utf-8", "replace");
      },
      nb::arg("token"), "The piece of one id as stored ('▁the'); bytes that are no UTF-8 become U+FFFD. IndexError.");
  type.def("piece_bytes", piece_bytes, nb::arg("token"), "The same as bytes, of a rank file exactly.");
  const auto property = [&type](const char* name, auto get, const char* doc) {
    type.def_prop_ro(
        name, [get](const PyTokenizer& self) { return (self.tokenizer.*get)(); }, doc);
  };
  property("vocab_size", &Tokenizer::vocab_size, "The highest id plus one.");
  property("bos_id", &Tokenizer::bos_id, "-1: none.");
  property("eos_id", &Tokenizer::eos_id, "-1: none.");
  property("unk_id", &Tokenizer::unk_id, "-1: none.");
  property("adds_bos", &Tokenizer::adds_bos, "Whether documents begin with BOS.");
  property("fingerprint", &Tokenizer::fingerprint, "Identity of the file's bytes.");
  type.def_ro("path", &PyTokenizer::path, "What it was loaded from.");
  type.def("__repr__", [](const PyTokenizer& self) {
    return "<mmrec.Tokenizer of " + std::to_string(self.tokenizer.vocab_size()) + " ids>";
  });
  type.def("__reduce__", [](const PyTokenizer& self) -> nb::object {
    return nb::make_tuple(result("load_again"),
                          nb::make_tuple(nb::type<PyTokenizer>(), self.path, nb::dict(), self.tokenizer.fingerprint()));
  });

  m.def(
      "encode_rolling",
      [](const PyTokenizer& self, nb::handle texts, nb::handle threads) {
        return encode_texts(self, texts, false, true, threads);
      },
      nb::call_guard<Call>(), nb::arg("tokenizer"), nb::arg("texts"), nb::arg("threads") = 0,
      "A list of the ids of each of `texts` after the prefix token (BOS, or else EOS), as `mmrec-ppl --mode rolling`\n"
      "takes documents.");
  m.def("encode_pairs", pairs_of, nb::call_guard<Call>(), nb::arg("tokenizer"), nb::arg("pairs"), nb::arg("add_bos"),
        nb::arg("max_length") = 0, nb::arg("threads") = 0,
        "A list of (ids [T], tokens of the context) of each of `pairs` (an iterable of context and continuation), as\n"
        "`mmrec-ppl --pairs` takes them. add_bos: whether BOS comes before a context.\n"
        "The last max_length + 1 tokens are kept (0: all). Raises ValueError for a context without tokens where the\n"
        "tokenizer has neither BOS nor EOS, and for a continuation of more than max_length tokens.");

  nb::class_<StreamDecoder> decoder(
      m, "StreamDecoder", "Decodes tokens one by one into complete characters: all pieces joined are decode() of all.");
  decoder.def(
      "__init__",
      [](StreamDecoder* self, const PyTokenizer& tokenizer, bool at_start) {
        new (self) StreamDecoder(tokenizer.tokenizer, at_start);
      },
      nb::arg("tokenizer"), nb::arg("at_start") = true,
      "at_start: the stream begins the text, so the first word's leading space goes. False after a prompt.");
  decoder.def(
      "push", [](StreamDecoder& self, nb::handle token) { return self.push(integer_of<int>(token, "token")); },
      nb::arg("token"), "Text that `token` completes, often none. IndexError for a bad id.");
  decoder.def("finish", &StreamDecoder::finish, "The end: an incomplete character becomes U+FFFD.");
  refuse_pickling(decoder, "a StreamDecoder is not pickled");
}

}  // namespace mmrec::python
