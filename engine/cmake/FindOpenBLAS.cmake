# Finds OpenBLAS with its C interface: target OpenBLAS::OpenBLAS. Debian's config file names no include directory in some
# releases, so the header and the library are looked up directly.
find_package(PkgConfig QUIET)
if(PkgConfig_FOUND)
  pkg_check_modules(PC_OpenBLAS QUIET openblas)
endif()
find_path(OpenBLAS_INCLUDE_DIR openblas_config.h HINTS ${PC_OpenBLAS_INCLUDE_DIRS} PATH_SUFFIXES openblas openblas-pthread)
find_library(OpenBLAS_LIBRARY openblas HINTS ${PC_OpenBLAS_LIBRARY_DIRS} PATH_SUFFIXES openblas-pthread)
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(OpenBLAS REQUIRED_VARS OpenBLAS_LIBRARY OpenBLAS_INCLUDE_DIR)
if(OpenBLAS_FOUND AND NOT TARGET OpenBLAS::OpenBLAS)
  add_library(OpenBLAS::OpenBLAS UNKNOWN IMPORTED)
  set_target_properties(OpenBLAS::OpenBLAS PROPERTIES
    IMPORTED_LOCATION "${OpenBLAS_LIBRARY}" INTERFACE_INCLUDE_DIRECTORIES "${OpenBLAS_INCLUDE_DIR}")
endif()
mark_as_advanced(OpenBLAS_INCLUDE_DIR OpenBLAS_LIBRARY)
