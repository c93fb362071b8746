// The kernels of a table on the model of a GPU: three ranks with unequal numbers of entries, two layers, values and
// scales of each unit's size.
#include "cuda.h"
#include "table.cu"

#include <stdio.h>

#include <string>

using namespace ty;

constexpr u32 kRanks = 3, kLayers = 2, kBlocks = 2;
constexpr u64 kMost = 5;
// Entries of each rank in layer 1; those of layer 0 stay zeros. Behind them, a word that no kernel may read.
constexpr u64 kCounts[kRanks + 1] = {5, 0, 3, 5};

[[noreturn]] void fail(const std::string& what) {
  fprintf(stderr, "%s\n", what.c_str());
  _exit(1);
}

// A byte of the values or scales of an entry.
u8 byte_of(u32 rank, u64 entry, u64 at) { return (u8)(rank * 89 + entry * 17 + at * 3 + 1); }

struct Field {
  u64 width, behind;
};

// A table whose entries have a field of `width` bytes, so far behind their start.
struct Tables {
  Field field;
  u64 pitch = (field.behind + field.width + 15) / 16 * 16;
  std::vector<std::vector<uint4>> rooms;
  u64 windows[kRanks];
  u64 wrong = 0;

  explicit Tables(Field of) : field(of) {
    for (u32 r = 0; r < kRanks; r++) {
      rooms.emplace_back(kLayers * kMost * pitch / 16);
      windows[r] = (u64)rooms[r].data();
    }
  }
  TableArgs arguments(u32 rank, u64 unit, u64 count, u8* part) {
    TableArgs a{};
    a.windows = windows, a.counts = kCounts, a.part = part, a.wrong = &wrong;
    a.first = kMost * pitch + field.behind, a.pitch = pitch, a.entries = kMost, a.count = count;
    a.units = (u32)(field.width / unit), a.index_bytes = 4, a.rank = rank, a.ranks = kRanks;
    return a;
  }
};

void run(void (*kernel)(TableArgs), TableArgs a) {
  model::launch(kBlocks, kWave, [=] { kernel(a); });
}
void (*fetch_of(u64 unit))(TableArgs) {
  return unit == 16 ? ty_table_fetch_16 : unit == 4 ? ty_table_fetch_4 : ty_table_fetch_1;
}
void (*write_of(u64 unit))(TableArgs) {
  return unit == 16 ? ty_table_write_16 : unit == 4 ? ty_table_write_4 : ty_table_write_1;
}

// All ranks write, and one fetches each entry, in another order and some of them twice.
void moves(Field field, u64 unit) {
  Tables tables(field);
  std::string name = "entries of " + std::to_string(field.width) + " bytes: ";
  for (u32 r = 0; r < kRanks; r++) {
    std::vector<uint4> part(kCounts[r] * field.width / 16 + 1);
    u8* bytes = (u8*)part.data();
    for (u64 i = 0; i < kCounts[r] * field.width; i++)
      bytes[i] = byte_of(r, i / field.width, i % field.width);
    run(write_of(unit), tables.arguments(r, unit, kCounts[r], bytes));
    const u8* window = (const u8*)tables.rooms[r].data();
    for (u64 i = 0; i < kLayers * kMost * tables.pitch; i++) {
      u64 entry = i / tables.pitch, at = i % tables.pitch - field.behind;
      bool is_there = entry >= kMost && entry - kMost < kCounts[r] && at < field.width;
      if (window[i] != (is_there ? byte_of(r, entry - kMost, at) : 0)) fail(name + "a wrong byte of a window");
    }
  }
  for (bool wide : {false, true}) {
    std::vector<i32> indices = {12, 0, 4, 10, 0, 3, 2, 11, 1};
    std::vector<i64> wide_ones(indices.begin(), indices.end());
    u64 count = indices.size();
    std::vector<uint4> part(count * field.width / 16 + 2);
    u8* bytes = (u8*)part.data();
    bytes[count * field.width] = 0xee;
    TableArgs a = tables.arguments(1, unit, count, bytes);
    a.indices = wide ? (const u8*)wide_ones.data() : (const u8*)indices.data(), a.index_bytes = wide ? 8 : 4;
    run(ty_table_check, a);
    if (tables.wrong != 0) fail(name + "an index with an entry was refused");
    run(fetch_of(unit), a);
    for (u64 i = 0; i < count * field.width; i++) {
      u64 index = indices[i / field.width];
      if (bytes[i] != byte_of(index / kMost, index % kMost, i % field.width)) fail(name + "a wrong byte was fetched");
    }
    if (bytes[count * field.width] != 0xee) fail(name + "a byte behind the part was written");
  }
}

// An index that names no entry is found, in each place and width.
void checks() {
  Tables tables({16, 0});
  constexpr i64 kWrong[] = {5, 9, 13, 15, -1, INT32_MIN, INT64_MIN, INT64_MAX};
  for (i64 index : kWrong)
    for (u64 place = 0; place < 100; place += 33) {
      std::vector<i64> wide(100, 12);
      wide[place] = index;
      std::vector<i32> narrow(wide.begin(), wide.end());
      TableArgs a = tables.arguments(0, 16, wide.size(), nullptr);
      a.indices = (const u8*)wide.data(), a.index_bytes = 8, tables.wrong = 0;
      run(ty_table_check, a);
      if (tables.wrong != place + 1) fail("an index without an entry was accepted");
      if (index != (i64)(i32)index) continue;
      a.indices = (const u8*)narrow.data(), a.index_bytes = 4, tables.wrong = 0;
      run(ty_table_check, a);
      if (tables.wrong != place + 1) fail("an index of 4 bytes without an entry was accepted");
    }
}

int main() {
  moves({256, 0}, 16);
  moves({48, 16}, 16);
  moves({16, 32}, 16);
  moves({12, 4}, 4);
  moves({4, 256}, 4);
  moves({7, 0}, 1);
  moves({5, 7}, 1);
  checks();
  return 0;
}
