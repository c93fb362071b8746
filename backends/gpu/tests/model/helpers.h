// Shared by the models: failures, memory, and the inputs of ranks.
#pragma once
#include "cuda.h"

#include <random>
#include <string>
#include <utility>

[[noreturn]] void fail(const std::string& what) {
  fprintf(stderr, "%s\n", what.c_str());
  _exit(1);
}
template <class A, class B>
void same(const std::string& what, A found, B expected) {
  if (found != (A)expected)
    fail(what + ": found " + std::to_string(found) + "; expected " + std::to_string(expected));
}

struct Shape {
  unsigned ranks, experts, topk, row_bytes, scale_words;
  unsigned max_tokens;  // M of the calls
  unsigned long long largest_put;
  unsigned groups = 1;
  unsigned local() const { return experts / ranks; }
  // M of the exchange.
  unsigned most() const { return max_tokens + experts % 3; }
};

template <class T>
T* room(unsigned long long count, unsigned long long align = 128) {
  void* at = aligned_alloc(align, (count * sizeof(T) + align) / align * align);
  memset(at, 0, count * sizeof(T));
  return (T*)at;
}

// The input of a rank to a dispatch.
struct Inputs {
  Shape s;
  unsigned me, tokens = 0;
  std::vector<long long> topk;
  std::vector<float> weights;
  unsigned char* x = nullptr;
  std::vector<unsigned> scales;
  int named = -1;  // the rank that row metadata names, if another one
  unsigned source() const { return named < 0 ? me : (unsigned)named; }
};

void bring(Inputs& r, unsigned tokens, std::mt19937& random) {
  r.tokens = tokens;
  r.topk.assign(r.s.max_tokens * r.s.topk + 1, -1);
  r.weights.assign(r.s.max_tokens * r.s.topk + 1, 0);
  r.scales.assign(r.s.max_tokens * r.s.scale_words + 1, 0);
  r.x = r.x ? r.x : room<unsigned char>((unsigned long long)r.s.max_tokens * r.s.row_bytes);
  std::vector<long long> experts(r.s.experts);
  for (unsigned e = 0; e < r.s.experts; e++) experts[e] = e;
  for (unsigned t = 0; t < tokens; t++) {
    std::shuffle(experts.begin(), experts.end(), random);
    for (unsigned k = 0; k < r.s.topk; k++) {
      if (random() % 5 != 0) r.topk[t * r.s.topk + k] = experts[k];
      r.weights[t * r.s.topk + k] = (float)(random() % 1000);
    }
    for (unsigned i = 0; i < r.s.row_bytes / 4; i++)
      ((float*)r.x)[(unsigned long long)t * r.s.row_bytes / 4 + i] = (float)(int)(random() % 4096) / 7;
    for (unsigned i = 0; i < r.s.scale_words; i++) r.scales[t * r.s.scale_words + i] = random();
  }
}

// The experts of rank `d` that a token selects, by k; -1 elsewhere.
std::vector<int> local_ids(const Inputs& s, unsigned token, unsigned d) {
  std::vector<int> ids(s.s.topk, -1);
  for (unsigned k = 0; k < s.s.topk; k++) {
    long long e = s.topk[token * s.s.topk + k];
    if (e >= 0 && e / s.s.local() == d) ids[k] = (int)(e - d * s.s.local());
  }
  return ids;
}
bool goes(const std::vector<int>& ids) {
  for (int id : ids)
    if (id >= 0) return true;
  return false;
}

void same_bytes(const std::string& what, const void* found, const void* expected, unsigned long long bytes) {
  if (memcmp(found, expected, bytes) != 0) fail(what + " differs");
}

// Whether all bytes are of one value.
bool all_are(unsigned char value, const unsigned char* from, unsigned long long bytes) {
  return bytes == 0 || (*from == value && memcmp(from, from + 1, bytes - 1) == 0);
}

// The row of each of a source's tokens at each rank, where rows are in order of source ranks, then of
// tokens: [source][token][rank], -1 where it does not go. Each source may have a block of rows.
using Rows = std::vector<std::vector<std::vector<long long>>>;
Rows received_rows(const std::vector<Inputs*>& ranks, unsigned block = 0) {
  Rows row(ranks.size());
  for (Inputs* source : ranks)
    row[source->me].assign(source->tokens, std::vector<long long>(ranks.size(), -1));
  for (unsigned d = 0; d < ranks.size(); d++) {
    long long n = 0;
    for (Inputs* source : ranks) {
      if (block > 0) n = (long long)source->me * block;
      for (unsigned t = 0; t < source->tokens; t++)
        if (goes(local_ids(*source, t, d))) row[source->me][t][d] = n++;
    }
  }
  return row;
}

// The ranks that a token goes to, in the order of their highest selecting k.
std::vector<unsigned> owners_of(const Inputs& source, unsigned token) {
  std::vector<unsigned> order;
  for (unsigned k = source.s.topk; k-- > 0;) {
    long long e = source.topk[token * source.s.topk + k];
    unsigned owner = e < 0 ? 0 : (unsigned)(e / source.s.local());
    if (e >= 0 && std::find(order.begin(), order.end(), owner) == order.end())
      order.insert(order.begin(), owner);
  }
  return order;
}
