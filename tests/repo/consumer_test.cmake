# Installs the build to a prefix, moves the prefix, builds tests/consumer against it and runs the README's program and the
# examples.
# Variables: SOURCE_DIR, BUILD_DIR, WORK_DIR, CONFIG, GENERATOR, CXX, CXX_FLAGS.
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT status EQUAL 0)
    list(JOIN ARGN " " command)
    message(FATAL_ERROR "failed (${status}): ${command}\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

file(REMOVE_RECURSE ${WORK_DIR})
run(${CMAKE_COMMAND} --install ${BUILD_DIR} --config ${CONFIG} --prefix ${WORK_DIR}/first)
file(RENAME ${WORK_DIR}/first ${WORK_DIR}/moved)

# Nothing installed may remember where it was built.
file(GLOB_RECURSE package_files ${WORK_DIR}/moved/*.cmake ${WORK_DIR}/moved/*.h)
list(LENGTH package_files count)
if(count LESS 10)
  message(FATAL_ERROR "only ${count} headers and CMake files were installed")
endif()
foreach(file IN LISTS package_files)
  file(READ ${file} text)
  foreach(path IN ITEMS ${SOURCE_DIR} ${BUILD_DIR} ${WORK_DIR})
    string(FIND "${text}" "${path}" at)
    if(NOT at EQUAL -1)
      message(FATAL_ERROR "${file} names ${path}: the package is not relocatable")
    endif()
  endforeach()
endforeach()

# The sources of the consumer go elsewhere too, so that it cannot see this tree.
file(COPY ${SOURCE_DIR}/tests/consumer/CMakeLists.txt ${SOURCE_DIR}/README.md ${SOURCE_DIR}/docs/examples
     DESTINATION ${WORK_DIR}/project)
run(${CMAKE_COMMAND} -S ${WORK_DIR}/project -B ${WORK_DIR}/build -G ${GENERATOR} -D CMAKE_BUILD_TYPE=${CONFIG}
    -D CMAKE_CXX_COMPILER=${CXX} "-DCMAKE_CXX_FLAGS=${CXX_FLAGS}" -D CMAKE_PREFIX_PATH=${WORK_DIR}/moved)
run(${CMAKE_COMMAND} --build ${WORK_DIR}/build --config ${CONFIG})

# The package says where the models are; the installed program finds the bundled one by itself.
file(READ ${WORK_DIR}/build/model_dir.txt model_dir)
if(NOT EXISTS ${model_dir}/mmrec-12m/config.json)
  message(FATAL_ERROR "the bundled model is not in ${model_dir}")
endif()
run(${WORK_DIR}/build/readme ${model_dir}/mmrec-12m)
string(STRIP "${output}" output)
if(output STREQUAL "")
  message(FATAL_ERROR "the README's program printed nothing")
endif()
message(STATUS "the README's program printed: ${output}")
run(${WORK_DIR}/build/kernels)
if(EXISTS ${WORK_DIR}/build/kernels_cuda)
  run(${WORK_DIR}/build/kernels_cuda)  # without a GPU it says so and succeeds
endif()
run(${WORK_DIR}/moved/bin/mmrec-generate --prompt Once --tokens 4 --seed 1)
