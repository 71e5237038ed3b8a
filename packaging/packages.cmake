# Debian packages of an installed build, by `cpack -G DEB`; scripts/package configures, builds and checks them.
#
#   mmrec          the programs, manual pages, completions, schemas and the bundled model
#   libmmrec0.2    the shared library; the name has its soname, as Debian's policy has it
#   libmmrec-dev   headers, the archive, CMake package and pkg-config file, examples
#
# Dependencies on libraries are those that dpkg-shlibdeps finds. What the policy wants besides (copyright, changelogs,
# compressed pages) is laid out by stage.cmake.
set(MMREC_MAINTAINER "mmrec authors <maintainers@users.noreply.github.com>" CACHE STRING "Maintainer of the packages")
file(READ ${PROJECT_SOURCE_DIR}/packaging/debian/changelog changelog)
string(REGEX MATCH "^mmrec \\(([^)-]+)-([^)]+)\\)" ignored "${changelog}")
if(NOT CMAKE_MATCH_1 STREQUAL PROJECT_VERSION)
  message(FATAL_ERROR "packaging/debian/changelog is of ${CMAKE_MATCH_1}, the project of ${PROJECT_VERSION}")
endif()
set(CPACK_DEBIAN_PACKAGE_RELEASE ${CMAKE_MATCH_2})

set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_CONTACT "${MMREC_MAINTAINER}")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "")  # each package has one of its own
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_INSTALL_DEFAULT_DIRECTORY_PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE
  WORLD_READ WORLD_EXECUTE)
set(CPACK_COMPONENTS_ALL tools runtime dev)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS_PRIVATE_DIRS ${PROJECT_BINARY_DIR})
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
set(CPACK_DEBIAN_COMPRESSION_TYPE xz)
set(CPACK_PRE_BUILD_SCRIPTS ${PROJECT_SOURCE_DIR}/packaging/stage.cmake)
set(CPACK_MMREC_SOURCE_DIR ${PROJECT_SOURCE_DIR})

set(abi ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
set(revision ${PROJECT_VERSION}-${CPACK_DEBIAN_PACKAGE_RELEASE})
set(about "MM-Rec is a recurrent language model with segment memory: its whole past is a
state of fixed size, so memory and time per token do not grow with the text.
")

set(CPACK_DEBIAN_TOOLS_PACKAGE_NAME mmrec)
set(CPACK_DEBIAN_TOOLS_PACKAGE_SECTION science)
set(CPACK_COMPONENT_TOOLS_DESCRIPTION "inference for the MM-Rec language model
${about}
mmrec-generate continues prompts, mmrec-ppl computes perplexities as other
programs define them, mmrec-quantize makes weights smaller, and mmrec-bench
measures what the machine can do. A small model of English is included.")

set(CPACK_DEBIAN_RUNTIME_PACKAGE_NAME libmmrec${abi})
set(CPACK_DEBIAN_RUNTIME_PACKAGE_SECTION libs)
# The trigger that the policy asks for; cpack adds scripts that call ldconfig, which is harmless besides.
file(WRITE ${PROJECT_BINARY_DIR}/debian/triggers "activate-noawait ldconfig\n")
file(WRITE ${PROJECT_BINARY_DIR}/debian/shlibs "libmmrec ${abi} libmmrec${abi} (>= ${PROJECT_VERSION})\n")
set(CPACK_DEBIAN_RUNTIME_PACKAGE_CONTROL_EXTRA ${PROJECT_BINARY_DIR}/debian/triggers ${PROJECT_BINARY_DIR}/debian/shlibs)
set(CPACK_COMPONENT_RUNTIME_DESCRIPTION "inference engine for the MM-Rec language model - shared library
${about}
This package has the shared library that programs are linked with.")

set(CPACK_DEBIAN_DEV_PACKAGE_NAME libmmrec-dev)
set(CPACK_DEBIAN_DEV_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_DEV_PACKAGE_DEPENDS "libmmrec${abi} (= ${revision}), libdnnl-dev, libsentencepiece-dev, libpcre2-dev, libfmt-dev")
set(CPACK_DEBIAN_DEV_PACKAGE_SUGGESTS "mmrec, cmake, pkg-config")
set(CPACK_COMPONENT_DEV_DESCRIPTION "inference engine for the MM-Rec language model - development files
${about}
This package has the headers, the static library, a CMake package, a
pkg-config file and examples.")

include(CPack)
