# Decides whether the CUDA backend is built: sets MMREC_HAS_CUDA.
#
# MMREC_CUDA=AUTO builds it where a toolkit of at least version 12.5 is found, ON insists, OFF never looks.
# MMREC_CUDA_ARCHITECTURES lists what the kernels are compiled for, as CMAKE_CUDA_ARCHITECTURES does; the default has
# code for every device from compute capability 8.0 to 9.0 and PTX for newer ones. Kernels that need Hopper's own
# instructions (*_sm90.cu) are compiled for sm_90a besides.
set(MMREC_CUDA AUTO CACHE STRING "Build the CUDA backend: AUTO, ON or OFF")
set_property(CACHE MMREC_CUDA PROPERTY STRINGS AUTO ON OFF)
set(MMREC_CUDA_ARCHITECTURES "80-real;86-real;89-real;90-real;90-virtual" CACHE STRING
  "Architectures that the CUDA kernels are compiled for")

set(MMREC_HAS_CUDA OFF)
if(MMREC_CUDA STREQUAL "OFF")
  return()
endif()

# The toolkit's version first: a compiler too old for this language standard or host compiler makes enable_language fail.
set(mmrec_cuda_version 12.5)
find_package(CUDAToolkit ${mmrec_cuda_version} QUIET)
include(CheckLanguage)
if(CUDAToolkit_FOUND)
  check_language(CUDA)
endif()
if(CUDAToolkit_FOUND AND CMAKE_CUDA_COMPILER)
  set(MMREC_HAS_CUDA ON)
elseif(MMREC_CUDA STREQUAL "AUTO")
  message(STATUS "CUDA backend: not built (no CUDA toolkit ${mmrec_cuda_version} or newer found)")
else()
  message(FATAL_ERROR "MMREC_CUDA=${MMREC_CUDA}: no working CUDA toolkit ${mmrec_cuda_version} or newer found")
endif()
