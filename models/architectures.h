// Every architecture.
#pragma once

#include <tuple>

#include "models/mmrec/mmrec.h"
#include "models/mmrec100m/mmrec100m.h"
#include "models/mmrec_jax/mmrec_jax.h"

namespace mmrec::models {

using Architectures = std::tuple<Mmrec, mmrec100m::Mmrec100m, mmrec_jax::MmrecJax>;

}  // namespace mmrec::models
