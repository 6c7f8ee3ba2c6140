# zig.cmake: the engine for another processor, by zig's C compiler (PyPI's `ziglang`), which brings
# the headers and the start code of every C library:
#
#   cmake -S . -B DIR -DCMAKE_TOOLCHAIN_FILE=cmake/zig.cmake \
#         -DGEM_ZIG=/path/to/zig -DGEM_TRIPLE=aarch64-linux-gnu.2.28
#
# Triples: x86_64, aarch64 or riscv64-linux-gnu.2.28 or -linux-musl; arm-linux-gnueabihf.2.28 or
# -linux-musleabihf; wasm32-wasi. With musl everything is linked statically.
set(CMAKE_TRY_COMPILE_PLATFORM_VARIABLES GEM_ZIG GEM_TRIPLE)
if(NOT GEM_ZIG OR NOT GEM_TRIPLE)
  message(FATAL_ERROR "zig.cmake: GEM_ZIG or GEM_TRIPLE is not set; see cmake/zig.cmake")
endif()

# What every machine of the kind runs; zig's own idea of it changes between versions.
if(GEM_TRIPLE MATCHES "^x86_64-")
  set(CMAKE_SYSTEM_PROCESSOR x86_64)
  set(gem_cpu x86_64)
elseif(GEM_TRIPLE MATCHES "^aarch64-")
  set(CMAKE_SYSTEM_PROCESSOR aarch64)
  set(gem_cpu generic)
elseif(GEM_TRIPLE MATCHES "^arm-")
  set(CMAKE_SYSTEM_PROCESSOR armv7)
  set(gem_cpu generic+v7a+vfp3d16-neon) # NEON flushes subnormal numbers
elseif(GEM_TRIPLE MATCHES "^riscv64-")
  set(CMAKE_SYSTEM_PROCESSOR riscv64)
  set(gem_cpu baseline_rv64)
elseif(GEM_TRIPLE MATCHES "^wasm32-")
  set(CMAKE_SYSTEM_PROCESSOR wasm32)
  set(gem_cpu generic+simd128)
else()
  message(FATAL_ERROR "zig.cmake: ${GEM_TRIPLE}: no engine for it; see the triples in cmake/zig.cmake")
endif()

if(GEM_TRIPLE MATCHES "^wasm32-")
  set(CMAKE_SYSTEM_NAME Generic)
  set(CMAKE_EXECUTABLE_SUFFIX .wasm)
  set(GEM_PORT wasi CACHE STRING "")
  set(GEM_BASE_ONLY ON CACHE BOOL "")
else()
  set(CMAKE_SYSTEM_NAME Linux)
  set(GEM_LIBM m CACHE STRING "")
endif()
if(GEM_TRIPLE MATCHES "musl")
  set(GEM_SHARED OFF CACHE BOOL "")
  set(CMAKE_EXE_LINKER_FLAGS_INIT -static)
endif()

set(CMAKE_C_COMPILER "${GEM_ZIG}" cc -target ${GEM_TRIPLE} -mcpu=${gem_cpu})
# No names of folders, which would make two builds differ; zig adds them by itself.
set(CMAKE_C_FLAGS_INIT -g0)
string(APPEND CMAKE_EXE_LINKER_FLAGS_INIT " -s")
set(CMAKE_SHARED_LINKER_FLAGS_INIT -s)
# zig's archiver is a subcommand of it.
set(CMAKE_AR "${GEM_ZIG}" CACHE FILEPATH "")
set(CMAKE_RANLIB "${GEM_ZIG}" CACHE FILEPATH "")
set(CMAKE_C_ARCHIVE_CREATE "<CMAKE_AR> ar qcD <TARGET> <OBJECTS>")
set(CMAKE_C_ARCHIVE_APPEND "<CMAKE_AR> ar qD <TARGET> <OBJECTS>")
set(CMAKE_C_ARCHIVE_FINISH "<CMAKE_RANLIB> ranlib -D <TARGET>")

set(CMAKE_FIND_ROOT_PATH "${CMAKE_CURRENT_LIST_DIR}/none") # nothing of this machine is linked
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)

# Flags of csrc/kernels.list, which are gcc's, in zig's words: one -mcpu with all features.
function(gem_translate_flags list)
  set(cpu ${gem_cpu})
  set(out "")
  foreach(flag IN LISTS ${list})
    if(flag MATCHES "^-march=armv8[^+]*\\+(.*)$")
      string(APPEND cpu "+${CMAKE_MATCH_1}")
    elseif(flag MATCHES "^-m(avx.*|fma|f16c)$")
      string(APPEND cpu "+${CMAKE_MATCH_1}")
    elseif(flag STREQUAL "-march=rv64gcv")
      string(APPEND cpu "+v")
    elseif(flag STREQUAL "-mfpu=vfpv4")
      set(cpu generic+v7a+vfp4-neon)
    elseif(flag STREQUAL "-mfpu=neon-vfpv4")
      set(cpu generic+v7a+vfp4+neon)
    elseif(flag MATCHES "^-m")
      message(FATAL_ERROR "zig.cmake: ${flag}: no translation; add one to gem_translate_flags")
    else()
      list(APPEND out ${flag})
    endif()
  endforeach()
  if(NOT cpu STREQUAL gem_cpu)
    list(PREPEND out "-mcpu=${cpu}")
  endif()
  set(${list} "${out}" PARENT_SCOPE)
endfunction()
