// Partial rows in LogFMT-10, as the tests expect them: row by row, on one thread.
#pragma once

// A row's values after its way. The numbers of each group are the kernels', which a test compares with the host's.
inline std::vector<float> after_its_way(const std::vector<float>& row) {
  u32 chunk = row.size() % 1024 == 0 ? 1024 : 512;
  std::vector<float> values = row;
  std::vector<u32> words;
  for (u32 at = 0; at < row.size(); at += CodedRows::group) {
    u32 most = 0, least = 0x7fff;
    for (u32 i = 0; i < CodedRows::group; i++) {
      u32 magnitude = (u32)model::bf16(row[at + i]) & 0x7fff;
      most = std::max(most, magnitude), least = std::min(least, magnitude);
    }
    words.push_back(most << 16 | least);
  }
  for (u32 at = 0; at < row.size(); at++) {
    auto first = words.begin() + at / chunk * (chunk / CodedRows::group);
    if (!std::all_of(first, first + chunk / CodedRows::group, may_be_coded)) continue;
    GroupCoder<CodedRows> coder(words[at / CodedRows::group]);
    values[at] = coder.value(coder.code((u32)model::bf16(row[at])));
  }
  return values;
}

// Rows of bf16 of which some chunks are encoded, although they are multiplied by weights up to 1000: of small
// values, of values that are near to each other, with zeros. Others have large values, or a group of zeros alone.
inline void bring_coded(u8* rows, u64 count, u32 width, std::mt19937& random) {
  for (u64 at = 0; at < count * width; at += CodedRows::group) {
    u32 kind = at % 512 == 0 || random() % 16 == 0 ? random() % 8 : 3;
    for (u32 i = 0; i < CodedRows::group; i++) {
      float some = (float)(int)(random() % 4099) / 4099 - 0.5f;
      float value = kind == 0 ? 1000 * some
                    : kind == 1 ? 0
                    : kind == 2 ? 0x1p-12f + some * 0x1p-16f
                    : random() % 40 == 0 ? 0
                                         : some * 0x1p-11f * std::exp2f(-(float)(random() % 12));
      ((u16*)rows)[at + i] = (u16)model::bf16(value);
    }
  }
}

// Reads rows of bf16 from the standard input, each behind its length, and writes their values after their way.
inline void convert_rows() {
  u32 width;
  while (fread(&width, 4, 1, stdin) == 1) {
    std::vector<u16> bits(width);
    if (fread(bits.data(), 2, width, stdin) != width) fail("a row is cut off");
    std::vector<float> row;
    for (u16 b : bits) row.push_back(std::bit_cast<float>((u32)b << 16));
    row = after_its_way(row);
    fwrite(row.data(), 4, width, stdout);
  }
}
