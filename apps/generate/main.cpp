// mmrec-generate: continues a prompt. stdout carries the text alone, as it is drawn; one line on stderr says what it
// cost.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "apps/common/arguments.h"
#include "apps/common/cli.h"
#include "apps/common/input.h"
#include "apps/common/model_folder.h"
#include "apps/common/output.h"
#include "apps/common/stopwatch.h"
#include "apps/generate/interactive.h"
#include "apps/generate/lines.h"
#include "apps/generate/options.h"
#include "apps/generate/prompt.h"
#include "apps/generate/records.h"
#include "apps/generate/sampling.h"
#include "mmrec/computed_with.h"
#include "mmrec/errors.h"
#include "mmrec/generate.h"
#include "mmrec/generator.h"
#include "mmrec/model.h"
#include "mmrec/tokenizer.h"

namespace mmrec::apps {
namespace {

using Json = nlohmann::ordered_json;

/// Throws where a request failed, or was none.
int exit_code_of(const RecordsDone& done) {
  if (interrupt_exit_code() != 0) return interrupt_exit_code();
  if (done.starved) std::rethrow_exception(done.starved);
  if (done.failed > 0) {
    throw NumericError(fmt::format("{} of {} prompts failed, {}", done.failed, done.records, done.first_failed));
  }
  if (done.refused > 0) {
    throw RejectedFile(fmt::format("{} of {} lines refused, {}", done.refused, done.records, done.first_refused));
  }
  return kOk;
}

/// --lines and --jsonl: as many prompts as there are lines, on as many GPUs as were asked for.
int many_main(GenerateCommand command, const GenerationDefaults& defaults, const std::optional<SavedSequence>& begun,
              Output& out) {
  const std::string file = command.jsonl ? *command.jsonl : prompt_file(command);
  LineReader lines(file, true, command.max_line_bytes);
  Stopwatch watch;
  const Loaded loaded = load(command, true);
  const Model& model = loaded.models.front();
  const Tokenizer& tokenizer = *loaded.tokenizer;
  command.options.eos_token_ids = end_of_sequence(loaded.info, defaults, tokenizer);
  std::shared_ptr<Session> start;
  if (begun) {
    start = std::make_shared<Session>(model.new_session(1, command.run.session));
    restore_state(*start, *begun, tokenizer, *command.state_in, computed_with(loaded.info, command.run.session));
  }
  // A line of --lines has at least one byte.
  const std::uint64_t most = command.lines ? input_size(file).value_or(0) : 0;
  Generator generator(loaded.models, tokenizer,
                      {.slots = command.slots,
                       .requests = most * static_cast<std::uint64_t>(command.num_samples),
                       .session = command.run.session});
  RecordQueue queue(generator, tokenizer, out, command.as_completed);
  const double load_seconds = watch.lap();

  const GracefulScope graceful;
  generate_lines(queue, lines, model, tokenizer, command, start);
  const RecordsDone& done = queue.done();
  const double seconds = watch.lap();
  out.commit();
  if (!command.quiet) {
    const std::string_view what = command.jsonl || command.num_samples > 1 ? "records" : "prompts";
    const std::string work =
        fmt::format("{} | {} {}, {} tokens in {:.2f} s, {:.1f} tok/s", place_of(loaded.info), done.records, what,
                    done.tokens, seconds, Timings::rate(static_cast<double>(done.tokens), seconds));
    log_line(fmt::format("{} | {}", cost_text(load_seconds, work), sampling_text(command.options.sampler)));
  }
  return exit_code_of(done);
}

/// --num-samples of one prompt that `session` has consumed: a record each.
RecordsDone draw_samples(const GenerateCommand& command, const Model& model, const Tokenizer& tokenizer,
                         Session session, const Json& head, Output& out) {
  Generator generator(model, tokenizer,
                      {.slots = std::min(command.slots, command.num_samples),
                       .requests = static_cast<std::uint64_t>(command.num_samples),
                       .session = command.run.session});
  RecordQueue queue(generator, tokenizer, out);
  GeneratorRequest request{.options = command.options, .start = std::make_shared<const Session>(std::move(session))};
  Samples samples(std::move(request), command.num_samples, model, command.run.session);
  while (samples.has_next()) {
    const int sample = samples.index();
    GeneratorRequest one = samples.next();
    auto begins =
        std::make_shared<const RecordHead>(Json{{"sample", sample}, {"seed", one.options.sampler.seed}}, head);
    const std::size_t bytes = begins->text.size() + samples.bytes();
    queue.submit(std::move(begins), Json::object(), std::move(one), command.detail(), fmt::format("sample {}", sample),
                 bytes);
    while (!queue.has_room()) queue.run_once();
  }
  while (queue.run_once()) {
  }
  return queue.done();
}

/// One prompt.
int prompt_main(GenerateCommand command, const GenerationDefaults& defaults, const std::optional<SavedSequence>& begun,
                Output& out) {
  GenerateOptions& options = command.options;
  options.logprobs = command.json;
  const bool has_prompt = !command.interactive || command.prompt || command.file;
  const std::string prompt = has_prompt ? read_prompt(command) : std::string();

  Stopwatch watch;
  Timings timings;
  const Loaded loaded = load(command, true, true);  // a sequence runs on one GPU
  const Model& model = loaded.models.front();
  const Tokenizer& tokenizer = *loaded.tokenizer;
  timings.load_seconds = watch.lap();
  timings.place = place_of(model.info());

  Session session = model.new_session(1, command.run.session);
  std::string with = computed_with(model.info(), command.run.session);
  if (begun) with = restore_state(session, *begun, tokenizer, *command.state_in, with);
  const std::int64_t began_at = session.position();
  options.eos_token_ids = end_of_sequence(model.info(), defaults, tokenizer);
  if (command.interactive) {
    if (!command.quiet) log_line(fmt::format("load {:.3f} s | {}", timings.load_seconds, timings.place));
    return interact({command, model, tokenizer, out, with}, std::move(session), options,
                    has_prompt ? std::optional(prompt) : std::nullopt);
  }
  const std::vector<int> ids =
      encode_prompt(tokenizer, model.info(), prompt, began_at > 0, !command.quiet, command.run.session.threads);
  if (command.echo && !command.json) {
    out.write(prompt);
    out.flush();
  }
  std::optional<PrefixCache> cache;
  if (command.prefix_cache) cache.emplace(command, model.info(), tokenizer);
  const GracefulScope graceful;
  watch.lap();
  timings.cached_tokens = prefill(session, ids, cache ? &*cache : nullptr, command.quiet);
  timings.prefill_seconds = watch.lap();
  timings.prefill_tokens = session.position() - began_at - timings.cached_tokens;
  timings.prefill = session.prefill_stats();

  const std::int64_t prompt_end = began_at + timings.cached_tokens + timings.prefill_tokens;
  options.cancelled = [] { return interrupt_exit_code() != 0; };
  if (command.num_samples > 1) {
    Json head = Json::object();
    if (command.echo) head["prompt"] = prompt;
    if (command.detail().tokens) head["prompt_tokens"] = ids;
    const RecordsDone done = draw_samples(command, model, tokenizer, std::move(session), head, out);
    timings.decode_seconds = watch.lap();
    timings.decode_tokens = done.tokens;
    out.commit();
    if (!command.quiet) log_line(timings.line(options.sampler, fmt::format("{} samples", done.records)));
    return exit_code_of(done);
  }

  std::optional<BackgroundWriter> writer;
  if (!command.json) {
    writer.emplace(out);
    options.on_text = [&](std::string_view text) { return writer->write(text), true; };
  }
  GenerateResult result;
  if (session.position() - began_at == std::ssize(ids)) {
    result = generate(session, tokenizer, options);
  } else {  // interrupted
    result.finish_reason = FinishReason::kCancelled;
  }
  if (writer) writer->finish();
  timings.decode_seconds = watch.lap();
  timings.decode_tokens = static_cast<std::int64_t>(result.tokens.size());
  timings.decode_bytes = decoded_bytes(model.info(), prompt_end, session.position() - prompt_end);
  if (command.state_out) {
    consume_last(session, result);
    write_state(*command.state_out, session, options.sampler, tokenizer, with);
    if (result.finish_reason == FinishReason::kStopString) {
      warn(fmt::format("{}: the state goes on to the end of the last token drawn, the text ends before the stop string",
                       *command.state_out));
    }
  }

  if (command.json) {
    Json json = result_json(result, options.sampler, ids, model.info(), command.folder, tokenizer, timings,
                            options.top_logprobs > 0);
    if (command.echo) json["prompt"] = prompt;
    json["state"] = {{"began_at", began_at}, {"position", session.position()}};
    out.write(dump(json) + "\n");
  } else {
    writer->end_line(command.quiet);
  }
  out.commit();
  if (!command.quiet) log_line(timings.line(options.sampler, to_string(result.finish_reason)));
  return interrupt_exit_code();
}

int generate_main(const Arguments& arguments) {
  // Everything that can be wrong with the command line, before anything is loaded.
  GenerateCommand command = generate_command(arguments);
  const GenerationDefaults defaults = load_generation_defaults(command.folder);
  Output out(command.output.value_or("-"));
  if (command.state_out) check_state_path(*command.state_out);
  std::optional<SavedSequence> begun;
  if (command.state_in) begun = read_state(*command.state_in);
  SamplerOptions& sampler = command.options.sampler;
  sampler = begun ? begun->sampler : defaults.sampler;
  if (!begun) sampler.seed = random_seed();
  set_sampler(arguments, sampler);
  return (command.lines || command.jsonl ? many_main : prompt_main)(std::move(command), defaults, begun, out);
}

}  // namespace
}  // namespace mmrec::apps

int main(int argc, char** argv) {
  return mmrec::apps::run_command(mmrec::apps::generate_program(), argc, argv, mmrec::apps::generate_main);
}
