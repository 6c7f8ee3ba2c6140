# gcc.cmake: the engine for another processor, by a compiler of your own:
#
#   cmake -S . -B DIR -DCMAKE_TOOLCHAIN_FILE=cmake/gcc.cmake \
#         -DGEM_PREFIX=aarch64-linux-gnu- -DGEM_PROCESSOR=aarch64
#
# GEM_PREFIX is what stands before `gcc` and `ar`, as in CROSS_COMPILE. With -DGEM_PORT=bare there is
# no system: -DGEM_CPU names the core's flags, such as "-mcpu=cortex-m7 -mfloat-abi=hard".
set(CMAKE_TRY_COMPILE_PLATFORM_VARIABLES GEM_PREFIX GEM_PROCESSOR GEM_PORT GEM_CPU)
if(NOT GEM_PROCESSOR)
  message(FATAL_ERROR "gcc.cmake: GEM_PROCESSOR is not set; see cmake/gcc.cmake")
endif()
set(CMAKE_SYSTEM_PROCESSOR ${GEM_PROCESSOR})
set(CMAKE_C_COMPILER "${GEM_PREFIX}gcc")
set(CMAKE_C_FLAGS_INIT "${GEM_CPU}")
if(GEM_PORT STREQUAL "bare")
  set(CMAKE_SYSTEM_NAME Generic)
  set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY) # a program needs a linker script
  set(GEM_BASE_ONLY ON CACHE BOOL "")
else()
  set(CMAKE_SYSTEM_NAME Linux)
  set(CMAKE_EXE_LINKER_FLAGS_INIT -s)
  set(CMAKE_SHARED_LINKER_FLAGS_INIT -s)
endif()
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
