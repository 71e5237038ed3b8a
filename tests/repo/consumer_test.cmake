# Installs the build to a prefix, moves the prefix, builds tests/consumer against it and runs the README's program and the
# examples, by CMake and by pkg-config: once with the archive, as it is installed by default, once with the shared library.
# Variables: SOURCE_DIR, BUILD_DIR, WORK_DIR, CONFIG, GENERATOR, CXX, CXX_FLAGS.
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT status EQUAL 0)
    list(JOIN ARGN " " command)
    message(FATAL_ERROR "failed (${status}): ${command}\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

# Nothing installed may remember where it was built.
function(expect_relocatable prefix)
  file(GLOB_RECURSE package_files ${prefix}/*.cmake ${prefix}/*.h ${prefix}/*.pc)
  list(LENGTH package_files count)
  if(count LESS 20)
    message(FATAL_ERROR "only ${count} headers, CMake and pkg-config files were installed")
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
endfunction()

# The README's program, compiled by what pkg-config says and nothing else.
function(compile_by_pkg_config kind prefix)
  find_program(PKG_CONFIG pkg-config REQUIRED)
  file(GLOB_RECURSE pc ${prefix}/*/mmrec.pc)
  get_filename_component(folder ${pc} DIRECTORY)
  set(environment PKG_CONFIG_PATH=${folder})
  run(${CMAKE_COMMAND} -E env ${environment} ${PKG_CONFIG} --cflags --libs mmrec)
  string(STRIP "${output}" pkg_flags)
  separate_arguments(flags UNIX_COMMAND "${CXX_FLAGS} ${pkg_flags}")
  run(${CXX} -std=c++20 ${WORK_DIR}/${kind}/readme.cpp -o ${WORK_DIR}/${kind}/by_pkg_config ${flags})
  run(${CMAKE_COMMAND} -E env ${environment} ${PKG_CONFIG} --variable=modeldir mmrec)
  string(STRIP "${output}" model_dir)
  get_filename_component(libraries ${folder} DIRECTORY)
  run(${CMAKE_COMMAND} -E env LD_LIBRARY_PATH=${libraries} ${WORK_DIR}/${kind}/by_pkg_config ${model_dir}/mmrec-12m)
  if(NOT output STREQUAL readme_text)
    message(FATAL_ERROR "compiled by pkg-config (${kind}) the README's program printed: ${output}")
  endif()
endfunction()

# tests/consumer with the archive or the shared library of `prefix`.
function(consume kind prefix)
  run(${CMAKE_COMMAND} -S ${WORK_DIR}/project -B ${WORK_DIR}/${kind} -G ${GENERATOR} -D CMAKE_BUILD_TYPE=${CONFIG}
      -D CMAKE_CXX_COMPILER=${CXX} "-DCMAKE_CXX_FLAGS=${CXX_FLAGS}" -D CMAKE_PREFIX_PATH=${prefix} ${ARGN})
  run(${CMAKE_COMMAND} --build ${WORK_DIR}/${kind} --config ${CONFIG})

  # The package says where the models are; the installed program finds the bundled one by itself.
  file(READ ${WORK_DIR}/${kind}/model_dir.txt model_dir)
  if(NOT EXISTS ${model_dir}/mmrec-12m/config.json)
    message(FATAL_ERROR "the bundled model is not in ${model_dir}")
  endif()
  run(${WORK_DIR}/${kind}/readme ${model_dir}/mmrec-12m)
  set(readme_text "${output}")
  string(STRIP "${output}" output)
  if(output STREQUAL "")
    message(FATAL_ERROR "the README's program printed nothing")
  endif()
  message(STATUS "the README's program (${kind}) printed: ${output}")
  run(${WORK_DIR}/${kind}/kernels)
  if(EXISTS ${WORK_DIR}/${kind}/kernels_cuda)
    run(${WORK_DIR}/${kind}/kernels_cuda)  # without a GPU it says so and succeeds
  endif()
  compile_by_pkg_config(${kind} ${prefix})
endfunction()

file(REMOVE_RECURSE ${WORK_DIR})
# The sources of the consumer go elsewhere too, so that it cannot see this tree.
file(COPY ${SOURCE_DIR}/tests/consumer/CMakeLists.txt ${SOURCE_DIR}/README.md ${SOURCE_DIR}/docs/examples
     DESTINATION ${WORK_DIR}/project)

run(${CMAKE_COMMAND} --install ${BUILD_DIR} --config ${CONFIG} --prefix ${WORK_DIR}/first)
file(RENAME ${WORK_DIR}/first ${WORK_DIR}/moved)
expect_relocatable(${WORK_DIR}/moved)
consume(static ${WORK_DIR}/moved)
run(${WORK_DIR}/moved/bin/mmrec-generate --prompt Once --tokens 4 --seed 1)

# The shared library in addition; find_package takes it where it is asked to, pkg-config as linkers do.
run(${CMAKE_COMMAND} --install ${BUILD_DIR} --config ${CONFIG} --prefix ${WORK_DIR}/moved --component shared)
file(RENAME ${WORK_DIR}/moved ${WORK_DIR}/again)
expect_relocatable(${WORK_DIR}/again)
consume(shared ${WORK_DIR}/again -D MMREC_COMPONENTS=shared)
foreach(program IN ITEMS readme by_pkg_config)
  run(ldd ${WORK_DIR}/shared/${program})
  if(NOT output MATCHES "libmmrec\\.so\\.[0-9]+\\.[0-9]+ ")
    message(FATAL_ERROR "${program} was not linked with the shared library:\n${output}")
  endif()
endforeach()
