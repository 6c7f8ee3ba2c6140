# install.cmake: libraries, headers, and what find_package(gemrun) and pkg-config read.
#
#   gemrun::static   gemrun::gemrun (shared, or static where there is no shared one)
#   gemrun::control  gemrun::minimal
include(CMakePackageConfigHelpers)
file(STRINGS csrc/gemrun.h line REGEX "^#define GEMRUN_VERSION")
string(REGEX REPLACE ".*\"(.*)\".*" "\\1" GEMRUN_VERSION "${line}")

set(GEMRUN_LIBRARIES gemrun_static gemrun_minimal)
if(GEM_SHARED)
  list(APPEND GEMRUN_LIBRARIES gemrun_shared)
endif()
if(GEM_PORT STREQUAL "posix")
  list(APPEND GEMRUN_LIBRARIES gemrun_control)
endif()
foreach(library IN LISTS GEMRUN_LIBRARIES)
  string(REPLACE gemrun_ "" name ${library})
  string(REGEX REPLACE "^shared$" "gemrun" name ${name})
  set_target_properties(${library} PROPERTIES EXPORT_NAME ${name})
endforeach()
install(TARGETS ${GEMRUN_LIBRARIES} EXPORT gemrun
  ARCHIVE COMPONENT library LIBRARY COMPONENT library RUNTIME COMPONENT library)
install(FILES csrc/gemrun.h csrc/gemrun.hpp csrc/gemrun_control.h csrc/gemrun_session.h
  csrc/gemrun_batch.h csrc/gemrun_thermal.h csrc/gemrun_board.h TYPE INCLUDE COMPONENT library)
install(FILES csrc/gembin.magic DESTINATION "${CMAKE_INSTALL_DATADIR}/gemrun"
  COMPONENT library)

set(package "${CMAKE_INSTALL_LIBDIR}/cmake/gemrun")
install(EXPORT gemrun NAMESPACE gemrun:: FILE gemrunTargets.cmake DESTINATION ${package}
  COMPONENT library)
configure_package_config_file(cmake/gemrunConfig.cmake.in "${CMAKE_BINARY_DIR}/gemrunConfig.cmake"
  INSTALL_DESTINATION ${package} NO_SET_AND_CHECK_MACRO NO_CHECK_REQUIRED_COMPONENTS_MACRO)
# Before 1.0 a minor version may change the interface.
write_basic_package_version_file("${CMAKE_BINARY_DIR}/gemrunConfigVersion.cmake"
  VERSION ${GEMRUN_VERSION} COMPATIBILITY SameMinorVersion)
install(FILES "${CMAKE_BINARY_DIR}/gemrunConfig.cmake"
  "${CMAKE_BINARY_DIR}/gemrunConfigVersion.cmake" DESTINATION ${package} COMPONENT library)

if(GEM_PORT STREQUAL "posix")
  configure_file(cmake/gemrun.pc.in gemrun.pc @ONLY)
  install(FILES "${CMAKE_BINARY_DIR}/gemrun.pc" DESTINATION "${CMAKE_INSTALL_LIBDIR}/pkgconfig"
    COMPONENT library)
endif()
