// The software ConnectX for the CPU's model of a GPU: a stand-in for hardware, for tests only. See src/lib.rs.
#pragma once
#include <cstdint>

extern "C" {

struct HcaWorld;
struct HcaQueueMemory {
  uint64_t requests, record, completion, register_;
  uint32_t depth;
};

HcaWorld* hca_world(uint32_t ranks, bool adaptive, uint64_t seed, uint32_t faulty, const char* faults);
uint32_t hca_register(const HcaWorld*, uint32_t rank, uint64_t address, uint64_t bytes);
uint32_t hca_queue(const HcaWorld*, uint32_t rank, const HcaQueueMemory*);
bool hca_connect(const HcaWorld*, uint32_t rank, uint32_t number, uint32_t peer, uint32_t peer_number);
void hca_start(HcaWorld*);
void hca_ring(const HcaWorld*, uint64_t address, uint64_t value);
const char* hca_syndrome(uint32_t code);
void hca_end(HcaWorld*);

}
