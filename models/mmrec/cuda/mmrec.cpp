// MM-Rec on a GPU.
#include "models/mmrec/mmrec.h"
#include "models/mmrec/cuda/chunk_plan.h"
#include "models/mmrec/cuda/ops.h"
#include "models/mmrec/cuda/padded.h"
#include "models/mmrec/cuda/staggered.h"
#include "models/mmrec/net.h"
#include "models/runtime/cuda/executor.h"

namespace mmrec::models {

template CudaModel make_cuda_executor(const Config&, const HostWeights&, Precision, int, bool);

}  // namespace mmrec::models
