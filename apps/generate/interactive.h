// --interactive: a text that a person and the model continue in turns.
//
// Must stay true: stdout has the model's text alone; the state can always go back to what it was before a turn.
#pragma once

#include <string>

#include "apps/common/output.h"
#include "apps/generate/options.h"
#include "mmrec/generate.h"
#include "mmrec/model.h"
#include "mmrec/session.h"
#include "mmrec/tokenizer.h"

namespace mmrec::apps {

/// What an interactive run has to work with.
struct Interaction {
  const GenerateCommand& command;
  const Model& model;
  const Tokenizer& tokenizer;
  Output& out;
  std::string computed_with;  // what the session was
};

/// Takes turns from where `session` stands, a first one of `prompt` if there is one (or if there is a state and -p is
/// given), until the input ends, /quit, or an interrupt while nothing runs; an interrupt during a turn ends that alone.
/// --state-out is saved at the end. Returns the exit code. Throws where the device or stdout fails.
int interact(const Interaction& interaction, Session session, GenerateOptions options,
             const std::optional<std::string>& prompt);

}  // namespace mmrec::apps
