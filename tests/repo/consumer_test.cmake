# Installs the build to a prefix, moves the prefix, builds tests/consumer and the project of docs/embedding.md against it,
# by CMake and by pkg-config, and checks what the programs print: once with the archive, as it is installed by default,
# once with the shared library.
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

# The block of `language` in docs/embedding.md, written to `file`.
function(write_block language file)
  file(READ ${SOURCE_DIR}/docs/embedding.md text)
  if(NOT text MATCHES "\n```${language}\n(([^`]|`[^`])*)\n```\n")
    message(FATAL_ERROR "docs/embedding.md has no block of ${language}")
  endif()
  file(WRITE ${file} "${CMAKE_MATCH_1}\n")
endfunction()

# Fails unless `text` matches.
function(expect what text pattern)
  if(NOT text MATCHES "${pattern}")
    message(FATAL_ERROR "${what} printed '${text}', expected ${pattern}")
  endif()
endfunction()

# The program of docs/embedding.md, by its CMake project and by its command line with pkg-config.
function(embed kind prefix model)
  set(app ${WORK_DIR}/embed-${kind})
  write_block(cmake ${app}/CMakeLists.txt)
  write_block(cpp ${app}/app.cpp)
  write_block(sh ${app}/command.sh)
  run(${CMAKE_COMMAND} -S ${app} -B ${app}/build -G ${GENERATOR} -D CMAKE_BUILD_TYPE=${CONFIG}
      -D CMAKE_CXX_COMPILER=${CXX} "-DCMAKE_CXX_FLAGS=${CXX_FLAGS}" -D CMAKE_PREFIX_PATH=${prefix})
  run(${CMAKE_COMMAND} --build ${app}/build --config ${CONFIG})
  run(${app}/build/app ${model} Once)
  set(text "${output}")
  expect("docs/embedding.md's program" "${text}" "^mmrec [0-9.]+\n.*[a-z]")

  file(GLOB_RECURSE pc ${prefix}/*/mmrec.pc)
  get_filename_component(pc ${pc} DIRECTORY)
  get_filename_component(libraries ${pc} DIRECTORY)
  set(environment PKG_CONFIG_PATH=${pc} LD_LIBRARY_PATH=${libraries})
  file(READ ${app}/command.sh command)
  string(REGEX REPLACE "^c\\+\\+" "${CXX} ${CXX_FLAGS}" command "${command}")
  file(WRITE ${app}/command.sh "${command}")
  run(${CMAKE_COMMAND} -E env ${environment} ${CMAKE_COMMAND} -E chdir ${app} sh -e command.sh)
  run(${CMAKE_COMMAND} -E env ${environment} ${app}/app ${model} Once)
  if(NOT output STREQUAL text)
    message(FATAL_ERROR "compiled with pkg-config (${kind}) it printed '${output}', by CMake '${text}'")
  endif()
  run(${CMAKE_COMMAND} -E env ${environment} pkg-config --variable=modeldir mmrec)
  string(STRIP "${output}" output)
  run(${app}/build/app ${output} Once)
  run(ldd ${app}/app)
  string(REGEX MATCH "libmmrec\\.so\\.[0-9]+\\.[0-9]+ => [^\n]*" library "${output}")
  if(kind STREQUAL "shared")
    if(NOT library)
      message(FATAL_ERROR "pkg-config did not link the shared library:\n${output}")
    endif()
    # Without a package that the library calls, and with the archive where that is asked for.
    run(${CMAKE_COMMAND} -E env PKG_CONFIG_LIBDIR=${pc} pkg-config --cflags --libs mmrec)
    run(${CMAKE_COMMAND} -E env PKG_CONFIG_LIBDIR=${pc} pkg-config --static --libs mmrec)
    string(REPLACE "-lmmrec" "-l:libmmrec.a" flags "${output}")
    separate_arguments(flags UNIX_COMMAND "${flags}")
    run(${CXX} -std=c++20 -I${prefix}/include ${app}/app.cpp -o ${app}/app ${flags})
    run(${app}/app ${model} Once)
  endif()

  # What goes wrong is told apart.
  execute_process(COMMAND ${app}/build/app RESULT_VARIABLE usage ERROR_QUIET)
  execute_process(COMMAND ${app}/build/app ${WORK_DIR}/nowhere Once RESULT_VARIABLE missing ERROR_QUIET)
  if(NOT usage EQUAL 2 OR NOT missing EQUAL 3)
    message(FATAL_ERROR "docs/embedding.md's program: exit codes ${usage} and ${missing}, expected 2 and 3")
  endif()
endfunction()

# What the examples print, against what the installed programs say of the same.
function(run_examples programs prefix model)
  set(prompt "The history of the city begins")
  execute_process(COMMAND ${programs}/generate ${model} ${prompt} OUTPUT_VARIABLE text ERROR_VARIABLE log
                  COMMAND_ERROR_IS_FATAL ANY)
  expect(generate.cpp "${log}" "^[0-9]+ tokens, ended by (length|eos)\n$")
  execute_process(COMMAND ${prefix}/bin/mmrec-generate --device cpu --prompt ${prompt} --tokens 32 --seed 1 --temp 0.7
                          --top-k 40 --top-p 0.95 --min-p 0.05 --repetition-penalty 1
                  OUTPUT_VARIABLE same ERROR_QUIET COMMAND_ERROR_IS_FATAL ANY)
  string(STRIP "${text}" text)
  string(STRIP "${same}" same)
  if(NOT text STREQUAL same)
    message(FATAL_ERROR "generate.cpp printed '${text}', mmrec-generate '${same}'")
  endif()

  file(WRITE ${WORK_DIR}/lines.txt "The river runs to the sea.\nIn 1914 the war began, and the town was taken.\nA king\n")
  execute_process(COMMAND ${programs}/score_documents ${model} INPUT_FILE ${WORK_DIR}/lines.txt OUTPUT_VARIABLE scores
                  COMMAND_ERROR_IS_FATAL ANY)
  expect(score_documents.cpp "${scores}" "^1\t[0-9]+\t[0-9.]+\n2\t[^\n]+\n3\t[^\n]+\ntokens [0-9]+, ppl ([0-9.]+), bits")
  string(REGEX REPLACE ".*, ppl ([0-9.]+), .*" "\\1" ppl "${scores}")
  run(${prefix}/bin/mmrec-ppl --device cpu --split-by line -q ${WORK_DIR}/lines.txt)
  expect(mmrec-ppl "${output}" "\nppl +${ppl}\n")

  run(${programs}/branch ${model} "The king was" "born in" "killed by")
  expect(branch.cpp "${output}" "^The king was born in.*\nThe king was killed by.*\nstate: [0-9]+ bytes, position [0-9]+\nbranches equal")

  run(${programs}/server_loop ${model} "The river" "In 1914" "A king" "The moon")
  expect(server_loop.cpp "${output}" "refused: [^\n]*-1[^\n]*expected")
  expect(server_loop.cpp "${output}" "The river.*In 1914.*A king.*The moon")
  set(first "${output}")
  run(${programs}/server_loop ${model} "The river" "In 1914" "A king" "The moon")
  if(NOT output STREQUAL first)
    message(FATAL_ERROR "server_loop.cpp printed '${first}', and '${output}' the next time")
  endif()

  foreach(example IN ITEMS generate score_documents branch server_loop)
    execute_process(COMMAND ${programs}/${example} RESULT_VARIABLE status OUTPUT_VARIABLE text ERROR_VARIABLE log)
    expect("${example}.cpp without arguments (exit code ${status})" "${status}${text}${log}" "^2usage: ${example} FOLDER[^\n]*\n$")
  endforeach()

  run(${programs}/kernels)
  expect(kernels.cpp "${output}" "expected 0\\.99997.*log p = -1\\.440190")
  if(EXISTS ${programs}/kernels_cuda)
    run(${programs}/kernels_cuda)  # without a GPU it says so and succeeds
  endif()
endfunction()

# tests/consumer with the archive or the shared library of `prefix`.
function(consume kind prefix)
  run(${CMAKE_COMMAND} -S ${WORK_DIR}/project -B ${WORK_DIR}/${kind} -G ${GENERATOR} -D CMAKE_BUILD_TYPE=${CONFIG}
      -D CMAKE_CXX_COMPILER=${CXX} "-DCMAKE_CXX_FLAGS=${CXX_FLAGS}" -D CMAKE_PREFIX_PATH=${prefix} ${ARGN})
  run(${CMAKE_COMMAND} --build ${WORK_DIR}/${kind} --config ${CONFIG})

  # The package says where the model is; the installed program finds the bundled one by itself.
  file(READ ${WORK_DIR}/${kind}/model_dir.txt model_dir)
  run(${WORK_DIR}/${kind}/readme ${model_dir})
  string(STRIP "${output}" output)
  if(output STREQUAL "")
    message(FATAL_ERROR "the README's program printed nothing")
  endif()
  message(STATUS "the README's program (${kind}) printed: ${output}")
  run_examples(${WORK_DIR}/${kind} ${prefix} ${model_dir})
  embed(${kind} ${prefix} ${model_dir})
endfunction()

file(REMOVE_RECURSE ${WORK_DIR})
# The sources of the consumer go elsewhere too, so that it cannot see this tree.
file(COPY ${SOURCE_DIR}/tests/consumer/CMakeLists.txt ${SOURCE_DIR}/README.md ${SOURCE_DIR}/docs/examples
     DESTINATION ${WORK_DIR}/project)

run(${CMAKE_COMMAND} --install ${BUILD_DIR} --config ${CONFIG} --prefix ${WORK_DIR}/first)
file(RENAME ${WORK_DIR}/first ${WORK_DIR}/moved)
expect_relocatable(${WORK_DIR}/moved)
foreach(file IN ITEMS man/man1/mmrec-ppl.1 bash-completion/completions/mmrec-ppl zsh/site-functions/_mmrec-ppl
                      fish/vendor_completions.d/mmrec-ppl.fish mmrec/schemas/mmrec-ppl.schema.json)
  if(NOT EXISTS ${WORK_DIR}/moved/share/${file})
    message(FATAL_ERROR "share/${file} was not installed")
  endif()
endforeach()
consume(static ${WORK_DIR}/moved)

# Asked for a library that is not there, find_package says so.
execute_process(COMMAND ${CMAKE_COMMAND} -S ${WORK_DIR}/project -B ${WORK_DIR}/none -G ${GENERATOR}
  -D CMAKE_CXX_COMPILER=${CXX} -D CMAKE_PREFIX_PATH=${WORK_DIR}/moved -D MMREC_COMPONENTS=shared
  RESULT_VARIABLE status OUTPUT_QUIET ERROR_VARIABLE errors)
if(status EQUAL 0)
  message(FATAL_ERROR "find_package(mmrec COMPONENTS shared) found a shared library that was not installed")
endif()
expect("find_package(mmrec COMPONENTS shared)" "${errors}" "The shared library of mmrec")

# As a part of another project: the library alone.
file(WRITE ${WORK_DIR}/part/CMakeLists.txt "cmake_minimum_required(VERSION 3.25)
project(whole LANGUAGES CXX)
add_subdirectory(${SOURCE_DIR} mmrec)
file(WRITE \${CMAKE_CURRENT_BINARY_DIR}/app.cpp \"int main() {}\")
add_executable(app \${CMAKE_CURRENT_BINARY_DIR}/app.cpp)
target_link_libraries(app PRIVATE mmrec::mmrec)
foreach(target IN ITEMS mmrec-generate mmrec_shared test_engine)
  if(TARGET \${target})
    message(FATAL_ERROR \"\${target} is a target of a project that has mmrec as a part\")
  endif()
endforeach()
")
run(${CMAKE_COMMAND} -S ${WORK_DIR}/part -B ${WORK_DIR}/part/build -G ${GENERATOR} -D CMAKE_CXX_COMPILER=${CXX}
    -D MMREC_CUDA=OFF)
run(${WORK_DIR}/moved/bin/mmrec-generate --prompt Once --tokens 4 --seed 1)

if(CXX_FLAGS MATCHES "-fsanitize")
  return()  # the shared library is made of the same objects; compiling all again takes a minute here
endif()

# The shared library in addition; find_package takes it where it is asked to, pkg-config as linkers do.
run(${CMAKE_COMMAND} --install ${BUILD_DIR} --config ${CONFIG} --prefix ${WORK_DIR}/moved --component shared)
file(RENAME ${WORK_DIR}/moved ${WORK_DIR}/again)
expect_relocatable(${WORK_DIR}/again)
consume(shared ${WORK_DIR}/again -D MMREC_COMPONENTS=shared)
run(ldd ${WORK_DIR}/shared/readme)
expect("ldd of the README's program" "${output}" "libmmrec\\.so\\.[0-9]+\\.[0-9]+ ")
