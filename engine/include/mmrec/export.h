// What the shared library shows. Everything is compiled with hidden symbols; what stands in a public header and is not
// inline is marked. tests/repo/exported_symbols.txt lists what comes of it.
#pragma once

#define MMREC_EXPORT __attribute__((visibility("default")))
/// A private part of a class that is exported.
#define MMREC_NO_EXPORT __attribute__((visibility("hidden")))
