# `cmake --install`: the library, its headers and CMake package, the programs and the bundled model.
#
# The package is relocatable: it names imported targets and paths relative to itself only. The find modules travel with
# it because the packages they look for ship no usable CMake configuration of their own.
set(mmrec_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/mmrec)

install(TARGETS mmrec EXPORT mmrec-targets FILE_SET HEADERS)
install(EXPORT mmrec-targets NAMESPACE mmrec:: DESTINATION ${mmrec_package_dir})

get_target_property(mmrec_type mmrec TYPE)
set(MMREC_IS_STATIC OFF)
if(mmrec_type STREQUAL "STATIC_LIBRARY")
  set(MMREC_IS_STATIC ON)
endif()
set(MMREC_INSTALL_MODELDIR ${CMAKE_INSTALL_DATADIR}/mmrec)
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/mmrec-config.cmake.in
  ${CMAKE_CURRENT_BINARY_DIR}/mmrec-config.cmake
  INSTALL_DESTINATION ${mmrec_package_dir} PATH_VARS MMREC_INSTALL_MODELDIR)
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/mmrec-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/mmrec-config.cmake ${CMAKE_CURRENT_BINARY_DIR}/mmrec-config-version.cmake
              ${CMAKE_CURRENT_LIST_DIR}/FindOpenBLAS.cmake ${CMAKE_CURRENT_LIST_DIR}/FindPCRE2.cmake
              ${CMAKE_CURRENT_LIST_DIR}/FindSentencePiece.cmake
        DESTINATION ${mmrec_package_dir})

foreach(program IN ITEMS mmrec-generate mmrec-ppl mmrec-bench)
  if(TARGET ${program})
    install(TARGETS ${program})
  endif()
endforeach()
install(DIRECTORY ${PROJECT_SOURCE_DIR}/weights/mmrec-12m DESTINATION ${MMREC_INSTALL_MODELDIR})
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
