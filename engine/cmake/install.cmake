# `cmake --install`: the library, its headers, CMake package and pkg-config file, the programs and the bundled model.
#
# The package is relocatable: it names imported targets and paths relative to itself only. The find modules travel with
# it because the packages they look for ship no usable CMake configuration of their own.
#
# Components: `tools` (programs, model), `runtime` (the shared library), `dev` (what compiling against it needs). Where
# only the archive is installed, `cmake --install BUILD --component shared` adds the shared library to it.
set(mmrec_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/mmrec)
set(mmrec_pc_dir ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
set(MMREC_INSTALL_MODELDIR ${CMAKE_INSTALL_DATADIR}/mmrec/mmrec-12m)

# mmrec.pc, which leads from its own folder to the prefix. Where only the archive is installed, --libs has all that it
# calls without --static. Where the shared library is, nothing else need be: its headers know no other package.
# Folders that are absolute (some distributions' are) stand there as they are.
if(IS_ABSOLUTE ${mmrec_pc_dir})
  set(mmrec_pc_prefix ${CMAKE_INSTALL_PREFIX})
else()
  file(RELATIVE_PATH to_prefix /prefix/${mmrec_pc_dir} /prefix)
  string(REGEX REPLACE "/$" "" to_prefix "${to_prefix}")
  set(mmrec_pc_prefix "\${pcfiledir}/${to_prefix}")
endif()
foreach(folder IN ITEMS LIBDIR INCLUDEDIR)
  cmake_path(APPEND mmrec_pc_${folder} "\${prefix}" ${CMAKE_INSTALL_${folder}})
endforeach()
cmake_path(APPEND mmrec_pc_MODELDIR "\${prefix}" ${MMREC_INSTALL_MODELDIR})
set(calls -pthread)
if(MMREC_HAS_CUDA)
  list(APPEND calls -L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -ldl -lrt)
endif()
list(JOIN calls " " calls)
set(requires sentencepiece fmt)
set(links -ldnnl -lsentencepiece -lfmt)
if(PCRE2_FOUND)
  list(APPEND requires libpcre2-8)
  list(APPEND links -lpcre2-8)
endif()
list(JOIN requires " " requires)
list(JOIN links " " links)
set(mmrec_pc_dependencies "Requires: ${requires}")
set(mmrec_pc_libs " -ldnnl ${calls}")  # its package has no .pc file
configure_file(${CMAKE_CURRENT_LIST_DIR}/mmrec.pc.in ${PROJECT_BINARY_DIR}/pkgconfig/static/mmrec.pc @ONLY)
set(mmrec_pc_dependencies "Libs.private: ${links} ${calls}")
set(mmrec_pc_libs "")
configure_file(${CMAKE_CURRENT_LIST_DIR}/mmrec.pc.in ${PROJECT_BINARY_DIR}/pkgconfig/shared/mmrec.pc @ONLY)

if(TARGET mmrec_shared)
  set(runtime COMPONENT runtime)
  set(development COMPONENT dev)
  if(NOT BUILD_SHARED_LIBS AND NOT MMREC_INSTALL_SHARED)
    set(runtime COMPONENT shared EXCLUDE_FROM_ALL)
    set(development ${runtime})
  endif()
  list(GET development 1 namelink)
  install(TARGETS mmrec_shared EXPORT mmrec-shared-targets
    LIBRARY ${runtime} NAMELINK_COMPONENT ${namelink} FILE_SET HEADERS ${development})
  install(EXPORT mmrec-shared-targets NAMESPACE mmrec:: DESTINATION ${mmrec_package_dir} ${development})
  # The archive's may be there; CMake takes two files of one time for the same.
  install(CODE "file(REMOVE \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/${mmrec_pc_dir}/mmrec.pc\")" ${development})
  install(FILES ${PROJECT_BINARY_DIR}/pkgconfig/shared/mmrec.pc DESTINATION ${mmrec_pc_dir} ${development})
endif()
if(NOT BUILD_SHARED_LIBS)
  install(TARGETS mmrec_static EXPORT mmrec-static-targets ARCHIVE COMPONENT dev FILE_SET HEADERS COMPONENT dev)
  install(EXPORT mmrec-static-targets NAMESPACE mmrec:: DESTINATION ${mmrec_package_dir} COMPONENT dev)
  if(NOT MMREC_INSTALL_SHARED)
    install(FILES ${PROJECT_BINARY_DIR}/pkgconfig/static/mmrec.pc DESTINATION ${mmrec_pc_dir} COMPONENT dev)
  endif()
endif()

configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/mmrec-config.cmake.in ${PROJECT_BINARY_DIR}/mmrec-config.cmake
  INSTALL_DESTINATION ${mmrec_package_dir} PATH_VARS MMREC_INSTALL_MODELDIR)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/mmrec-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/mmrec-config.cmake ${PROJECT_BINARY_DIR}/mmrec-config-version.cmake
              ${CMAKE_CURRENT_LIST_DIR}/FindOneDNN.cmake ${CMAKE_CURRENT_LIST_DIR}/FindPCRE2.cmake
              ${CMAKE_CURRENT_LIST_DIR}/FindSentencePiece.cmake
        DESTINATION ${mmrec_package_dir} COMPONENT dev)

foreach(program IN LISTS MMREC_PROGRAMS)
  if(TARGET ${program})
    install(TARGETS ${program} RUNTIME COMPONENT tools)
  endif()
endforeach()
if(TARGET mmrec_documents)
  install(DIRECTORY ${PROJECT_BINARY_DIR}/share/man/ DESTINATION ${CMAKE_INSTALL_MANDIR} COMPONENT tools)
  foreach(shell IN ITEMS bash-completion zsh fish)
    install(DIRECTORY ${PROJECT_BINARY_DIR}/share/${shell} DESTINATION ${CMAKE_INSTALL_DATADIR} COMPONENT tools)
  endforeach()
endif()
install(DIRECTORY ${PROJECT_SOURCE_DIR}/weights/mmrec-12m/ DESTINATION ${MMREC_INSTALL_MODELDIR} COMPONENT tools)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/docs/schemas DESTINATION ${CMAKE_INSTALL_DATADIR}/mmrec COMPONENT tools)
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT tools)
