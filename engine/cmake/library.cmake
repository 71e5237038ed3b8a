# The library that users link: the objects of all layers and the public headers, as an archive and as a shared library.
#
# mmrec::mmrec is the archive, or the shared library with BUILD_SHARED_LIBS. The programs are linked with the archive
# always: the benches measure what the shared library does not show, and a program runs without being told where a
# library is. What the shared library shows is what the headers mark (mmrec/export.h); the version script keeps in what
# its dependencies and templates would add.
file(GLOB mmrec_public_headers CONFIGURE_DEPENDS
  engine/include/mmrec/*.h models/include/mmrec/*.h kernels/include/mmrec/*.h)
list(APPEND mmrec_public_headers ${PROJECT_BINARY_DIR}/include/mmrec/version.h)

# mmrec_static or mmrec_shared; an installed package calls them mmrec::static and mmrec::shared.
function(mmrec_library kind)
  string(TOUPPER ${kind} type)
  add_library(mmrec_${kind} ${type} $<TARGET_OBJECTS:mmrec_kernels> $<TARGET_OBJECTS:mmrec_models>
    $<TARGET_OBJECTS:mmrec_models_device> $<TARGET_OBJECTS:mmrec_engine> $<TARGET_OBJECTS:mmrec_engine_device>)
  target_compile_features(mmrec_${kind} PUBLIC cxx_std_20)
  target_sources(mmrec_${kind} PUBLIC FILE_SET HEADERS FILES ${mmrec_public_headers}
    BASE_DIRS engine/include models/include kernels/include ${PROJECT_BINARY_DIR}/include)
  target_link_libraries(mmrec_${kind} PRIVATE OneDNN::OneDNN SentencePiece::SentencePiece ${mmrec_pcre2} fmt::fmt
    Threads::Threads)
  if(MMREC_HAS_CUDA)
    target_sources(mmrec_${kind} PRIVATE $<TARGET_OBJECTS:mmrec_models_cuda> $<TARGET_OBJECTS:mmrec_kernels_cuda>
      $<TARGET_OBJECTS:mmrec_kernels_sm90>)
    target_link_libraries(mmrec_${kind} PRIVATE CUDA::cudart_static ${CMAKE_DL_LIBS})
  endif()
  set_target_properties(mmrec_${kind} PROPERTIES OUTPUT_NAME mmrec EXPORT_NAME ${kind} LINKER_LANGUAGE CXX)
endfunction()

mmrec_library(static)
if(BUILD_SHARED_LIBS OR MMREC_INSTALL_SHARED OR MMREC_BUILD_TESTS)
  mmrec_library(shared)
  set(abi ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})  # until 1.0 a minor version may change the interface
  configure_file(${CMAKE_CURRENT_LIST_DIR}/mmrec.map.in ${PROJECT_BINARY_DIR}/mmrec.map @ONLY)
  set_target_properties(mmrec_shared PROPERTIES VERSION ${PROJECT_VERSION} SOVERSION ${abi}
    LINK_DEPENDS ${PROJECT_BINARY_DIR}/mmrec.map)
  target_link_options(mmrec_shared PRIVATE
    LINKER:--version-script=${PROJECT_BINARY_DIR}/mmrec.map LINKER:--as-needed
    # Every symbol is found when the library is made; a sanitizer's come with the program.
    $<$<NOT:$<CONFIG:Debug>>:LINKER:--no-undefined>)
endif()
if(BUILD_SHARED_LIBS)
  add_library(mmrec::mmrec ALIAS mmrec_shared)
else()
  add_library(mmrec::mmrec ALIAS mmrec_static)
endif()
