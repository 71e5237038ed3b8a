#include "apps/generate/interactive.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <deque>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "apps/common/cli.h"
#include "apps/common/input.h"
#include "apps/common/stopwatch.h"
#include "apps/generate/line_editor.h"
#include "apps/generate/prompt.h"
#include "apps/generate/records.h"
#include "apps/generate/sampling.h"
#include "mmrec/computed_with.h"
#include "mmrec/errors.h"

namespace mmrec::apps {
namespace {

constexpr std::size_t kMostUndone = 16;

constexpr std::string_view kCommands =
    R"(A line is appended to the text, which the model then continues; so does an empty one.
Ctrl-C ends a turn, and between turns the program. A line that begins with // begins with /.
  /undo        back to before the last turn, up to 16 times
  /retry       the last turn again, with the next seed
  /set K=V     {}; /set alone shows the chain
  /save FILE   save the state; /load FILE: go on there
  /reset       begin a new text
  /quit        end; so does Ctrl-D
)";

/// What /set sets, as options of the command line.
std::vector<std::string_view> settable() {
  std::vector<std::string_view> names;
  for (const SamplerOption& option : kSamplerOptions) {
    if (option.in_programs()) names.push_back(option.flag);
  }
  names.insert(names.end(), {"tokens", "stop"});
  return names;
}

constexpr std::string_view kPrompt = "> ";

bool is_terminal() { return isatty(STDIN_FILENO) == 1; }
void say(std::string_view text) { (void)!write(STDERR_FILENO, text.data(), text.size()); }

class Conversation {
 public:
  Conversation(const Interaction& of, Session session, GenerateOptions options)
      : of_(of), session_(std::move(session)), with_(of.computed_with), options_(std::move(options)) {
    options_.cancelled = [] { return interrupt_exit_code() != 0; };
  }

  int run(const std::optional<std::string>& prompt) {
    const GracefulScope graceful;
    const LineEditor editor = line_editor();
    LineReader lines("-", false);
    const auto next = [&]() -> std::optional<std::string> {
      if (editor) return editor(kPrompt);
      if (is_terminal()) say(kPrompt);
      const auto line = lines.next();
      return line ? std::optional<std::string>(*line) : std::nullopt;
    };
    if (is_terminal() && !of_.command.quiet) log_line("/help lists the commands");
    bool goes_on = true;
    if (prompt) goes_on = turn(*prompt);
    while (goes_on) {
      const auto line = next();
      if (!line) break;
      goes_on = answer(*line);
    }
    if (is_terminal()) say("\n");
    if (of_.command.state_out) save(*of_.command.state_out);
    return interrupt_exit_code();
  }

 private:
  struct Turn {
    Session before;    // moved from once it is undone
    std::string with;  // what the state was computed with
    std::string text;
    bool is_turn = true;  // or something else that changed the state
  };

  /// False to end.
  bool answer(std::string_view line) {
    if (line.ends_with('\r')) line.remove_suffix(1);
    const std::size_t end = std::min(line.find(' '), line.size());
    const std::string_view word = line.substr(0, end);
    std::string_view rest = line.substr(end);
    rest.remove_prefix(std::min(rest.find_first_not_of(' '), rest.size()));
    try {
      if (!line.starts_with('/')) return turn(line);
      if (line.starts_with("//")) return turn(line.substr(1));
      return command(word, std::string(rest));
    } catch (const UsageError& error) {
      log_line(error.what());
    } catch (const RejectedFile& error) {
      log_line(error.what());
    } catch (const WriteError& error) {  // of a state
      log_line(error.what());
    }
    return true;
  }

  bool command(std::string_view word, const std::string& rest) {
    if (word == "/quit" || word == "/exit") return false;
    if (word == "/help") {
      say(fmt::format(kCommands, fmt::join(settable(), ", ")));
    } else if (word == "/undo") {
      undo();
    } else if (word == "/retry") {
      const auto last = undo();
      if (last && last->is_turn) {
        ++options_.sampler.seed;
        return turn(last->text);
      }
    } else if (word == "/set") {
      set(rest);
    } else if (word == "/save") {
      save(named(word, rest));
    } else if (word == "/load") {
      load(named(word, rest));
    } else if (word == "/reset") {
      remember("", false);
      session_.reset();
      with_ = this_run();
    } else {
      throw UsageError(fmt::format("unknown command '{}' (/help lists them)", printable(word)));
    }
    return true;
  }

  static const std::string& named(std::string_view word, const std::string& file) {
    if (file.empty()) throw UsageError(fmt::format("{}: which file?", word));
    return file;
  }

  void remember(std::string_view text, bool is_turn) {
    if (turns_.size() == kMostUndone) turns_.pop_front();
    turns_.push_back({session_.clone(), with_, std::string(text), is_turn});
  }

  /// What is undone.
  std::optional<Turn> undo() {
    if (turns_.empty()) throw UsageError("nothing to undo");
    std::optional<Turn> last(std::move(turns_.back()));
    turns_.pop_back();
    session_ = std::move(last->before);
    with_ = last->with;
    log_line(fmt::format("at position {}", session_.position()));
    return last;
  }

  /// One that came to nothing.
  void forget_turn() {
    session_ = std::move(turns_.back().before);
    with_ = std::move(turns_.back().with);
    turns_.pop_back();
  }

  void set(const std::string& rest) {
    if (!rest.empty()) {
      // K=V, or K V, or K = V.
      const std::size_t key_end = std::min(rest.find_first_of("= "), rest.size());
      std::string_view value = std::string_view(rest).substr(key_end);
      const auto skip_spaces = [&] { value.remove_prefix(std::min(value.find_first_not_of(' '), value.size())); };
      if (value.starts_with(' ')) {
        skip_spaces();
        if (value.starts_with('=')) value.remove_prefix(1), skip_spaces();
      } else if (!value.empty()) {
        value.remove_prefix(1);
      }
      std::string key = rest.substr(0, key_end);
      std::replace(key.begin(), key.end(), '_', '-');
      const std::vector<std::string_view> names = settable();
      std::vector<Option> options;
      for (const Option& option : generate_program().options) {
        if (std::find(names.begin(), names.end(), option.name) != names.end()) options.push_back(option);
      }
      const std::string argument = fmt::format("--{}{}{}", key, key_end == rest.size() ? "" : "=", value);
      const std::array<const char*, 2> arguments = {"mmrec-generate", argument.c_str()};
      Program program = generate_program();
      program.operands = {};
      program.options = options;
      const Arguments given(program, static_cast<int>(arguments.size()), arguments.data());
      set_sampler(given, options_.sampler);
      set_options(given, options_);
    }
    log_line(fmt::format("{}, at most {} tokens", sampling_text(options_.sampler), options_.max_tokens));
  }

  std::string this_run() const { return computed_with(of_.model.info(), of_.command.run.session); }

  void save(const std::string& file) {
    refuse_lost_inputs(of_.command.named, {"state-out", file, Names::kOutput});
    write_state(file, session_, options_.sampler, of_.tokenizer, with_);
    log_line(fmt::format("{}: saved at position {}", file, session_.position()));
  }

  void load(const std::string& file) {
    const SavedSequence saved = read_state(file);
    remember("", false);
    try {
      with_ = restore_state(session_, saved, of_.tokenizer, file, this_run());
    } catch (...) {
      turns_.pop_back();
      throw;
    }
    options_.sampler = saved.sampler;
    log_line(fmt::format("{}: at position {}, {}", file, session_.position(), sampling_text(options_.sampler)));
  }

  /// Consumes `text` and draws what follows. False where the program has been told to end.
  bool turn(std::string_view text) {
    const std::int64_t began_at = session_.position();
    const std::vector<int> ids = encode_prompt(of_.tokenizer, of_.model.info(), text, began_at > 0);
    remember(text, true);
    Timings timings;
    Stopwatch watch;
    if (!ids.empty()) prefill(session_, ids, nullptr, of_.command.quiet);
    timings.prefill_seconds = watch.lap();
    timings.prefill_tokens = session_.position() - began_at;
    GenerateResult result;
    if (timings.prefill_tokens == std::ssize(ids)) {
      result = draw(timings, watch);
    } else {
      result.finish_reason = FinishReason::kCancelled;
      forget_turn();
    }
    if (!of_.command.quiet) log_line(timings.turn_line(options_.sampler, to_string(result.finish_reason)));
    if (interrupt_exit_code() == kInterrupted) {  // of this turn alone
      forget_interrupt();
      return true;
    }
    return interrupt_exit_code() == 0;
  }

  GenerateResult draw(Timings& timings, Stopwatch& watch) {
    BackgroundWriter writer(of_.out);
    options_.on_text = [&](std::string_view more) { return writer.write(more), true; };
    GenerateResult result;
    const std::int64_t began_at = session_.position();
    try {
      result = generate(session_, of_.tokenizer, options_);
    } catch (const NumericError& error) {
      result.finish_reason = FinishReason::kError;
      log_line(fmt::format("{}; back to before this turn", error.what()));
      forget_turn();
      return result;
    }
    writer.finish();
    options_.on_text = {};
    timings.decode_seconds = watch.lap();
    timings.decode_tokens = std::ssize(result.tokens);
    timings.decode_bytes = decoded_bytes(of_.model.info(), began_at, session_.position() - began_at);
    consume_last(session_, result);
    writer.end_line(of_.command.quiet);
    return result;
  }

  Interaction of_;
  Session session_;
  std::string with_;  // what the state was computed with
  GenerateOptions options_;
  std::deque<Turn> turns_;
};

}  // namespace

int interact(const Interaction& interaction, Session session, GenerateOptions options,
             const std::optional<std::string>& prompt) {
  return Conversation(interaction, std::move(session), std::move(options)).run(prompt);
}

}  // namespace mmrec::apps
