// What decides the bits of results, beside the model and the tokens.
#pragma once

#include <string>

#include "mmrec/export.h"
#include "mmrec/model.h"
#include "mmrec/session.h"

namespace mmrec {

/// All that decides the bits of a state or a score beside the model (ModelInfo::fingerprint), the tokens and how they
/// are cut into calls: "name=value", separated by "; ". Equal texts mean equal bits as docs/numerics.md promises them;
/// results of different texts agree within its bounds only. Printable, and for people too; the names may change between
/// versions. Throws std::invalid_argument for an option out of range.
MMREC_EXPORT std::string computed_with(const ModelInfo& info, const SessionOptions& options = {});

}  // namespace mmrec
