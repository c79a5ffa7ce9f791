// An allocator for torch's tensors on the CPU that puts each of them on pages of its own, right before a page that nobody
// may touch, or right behind one: an element too far is a crash, not a matter of luck. So is the use of freed memory.
#include <c10/core/Allocator.h>
#include <sys/mman.h>
#include <unistd.h>

#include <mutex>
#include <unordered_map>

namespace {

struct Region {
  void* pages;
  size_t bytes;
};
std::mutex& mutex = *new std::mutex;  // tensors may outlive all else
std::unordered_map<void*, Region>& regions = *new std::unordered_map<void*, Region>;  // by the address of their data

void release(void* data) {
  if (data == nullptr) return;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto at = regions.find(data);
  munmap(at->second.pages, at->second.bytes);
  regions.erase(at);
}

struct Guarded final : c10::Allocator {
  bool behind = false;  // the guard page lies behind the tensor, else before

  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (bytes == 0) return {nullptr, nullptr, release, cpu};
    const size_t page = sysconf(_SC_PAGESIZE), whole = (bytes + page - 1) / page * page;
    void* pages = mmap(nullptr, whole + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(pages != MAP_FAILED, "no memory for ", bytes, " bytes and a guard page");
    char* first = static_cast<char*>(pages);
    TORCH_CHECK(mprotect(behind ? first + whole : first, page, PROT_NONE) == 0, "a guard page cannot be protected");
    void* data = behind ? first + whole - bytes : first + page;
    const std::lock_guard<std::mutex> lock(mutex);
    regions[data] = {pages, whole + page};
    return {data, data, release, cpu};
  }
  c10::DeleterFnPtr raw_deleter() const override { return release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};
Guarded& guarded = *new Guarded;  // tensors may outlive everything
c10::Allocator* usual = nullptr;

}  // namespace

extern "C" void guard(bool behind) {
  if (usual == nullptr) usual = c10::GetAllocator(c10::DeviceType::CPU);
  guarded.behind = behind;
  c10::SetAllocator(c10::DeviceType::CPU, &guarded, 255);
}

extern "C" void unguard() {
  if (usual != nullptr) c10::SetAllocator(c10::DeviceType::CPU, usual, 255);
}
