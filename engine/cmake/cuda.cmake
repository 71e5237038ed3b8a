# Decides whether the CUDA backend is built: sets MMREC_HAS_CUDA.
#
# MMREC_CUDA=AUTO builds it where a toolkit of at least version 12.5 is found, ON insists, OFF never looks.
# MMREC_CUDA_ARCHITECTURES says what the kernels are compiled for: AUTO, the GPUs of this machine, else 9.0; ALL, every
# device from compute capability 8.0 to 9.0 and PTX for newer ones, which takes three times as long; PTX, that alone and
# hardly optimised, which takes a third of the time and shows that all compiles; or a list as of
# CMAKE_CUDA_ARCHITECTURES. Kernels that need Hopper's own instructions (*_sm90.cu) are compiled for sm_90a besides.
set(MMREC_CUDA AUTO CACHE STRING "Build the CUDA backend: AUTO, ON or OFF")
set_property(CACHE MMREC_CUDA PROPERTY STRINGS AUTO ON OFF)
set(MMREC_CUDA_ARCHITECTURES AUTO CACHE STRING "What the CUDA kernels are compiled for: AUTO, ALL, PTX or a list")

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

set(mmrec_cuda_architectures ${MMREC_CUDA_ARCHITECTURES})
set(mmrec_sm90_architecture 90a-real)
if(MMREC_CUDA_ARCHITECTURES STREQUAL "ALL")
  set(mmrec_cuda_architectures 80-real 86-real 89-real 90-real 90-virtual)
elseif(MMREC_CUDA_ARCHITECTURES STREQUAL "PTX")
  set(mmrec_cuda_architectures 90-virtual)
  set(mmrec_sm90_architecture 90a-virtual)
  if(CUDAToolkit_VERSION VERSION_GREATER_EQUAL 13)
    set(mmrec_cuda_options -Ofc=max)
  endif()
elseif(MMREC_CUDA_ARCHITECTURES STREQUAL "AUTO")
  execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader OUTPUT_VARIABLE found
    RESULT_VARIABLE ignored ERROR_QUIET)
  string(REGEX MATCHALL "[0-9]+\\.[0-9]" found "${found}")
  set(mmrec_cuda_architectures)
  foreach(capability IN LISTS found)
    string(REPLACE "." "" capability ${capability})
    if(capability GREATER 90)
      list(APPEND mmrec_cuda_architectures 90-virtual)
    elseif(capability GREATER_EQUAL 80)
      list(APPEND mmrec_cuda_architectures ${capability}-real)
    endif()
  endforeach()
  list(REMOVE_DUPLICATES mmrec_cuda_architectures)
  if(NOT mmrec_cuda_architectures)
    set(mmrec_cuda_architectures 90)
  endif()
endif()
if(MMREC_HAS_CUDA)
  list(JOIN mmrec_cuda_architectures " " mmrec_cuda_code)  # which kernels/cuda/runtime/cuda.cpp compares a device with
  message(STATUS "CUDA backend: compiled for ${mmrec_cuda_code} (MMREC_CUDA_ARCHITECTURES=ALL: for every GPU); takes minutes")
endif()
