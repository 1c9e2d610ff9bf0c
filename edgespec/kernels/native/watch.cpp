// At which nodes of a graph somebody wants to be called: see watch.h.
#include "watch.h"
#include "ggml_abi.h"
#include "guard.h"
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

using edgespec::Tensor;

namespace {

constexpr size_t NAME_BYTES = sizeof(Tensor::name);
constexpr int SOURCES = sizeof(Tensor::src) / sizeof(Tensor *);

// Values by address. Most addresses that are looked up lie outside the range of all that are known.
template <typename Value> class ByAddress {
    std::unordered_map<const void *, Value> values;
    const void *first = nullptr, *last = nullptr;

  public:
    void set(const void * address, Value value) {
        const std::less<const void *> before;
        if (values.empty() || before(address, first)) first = address;
        if (values.empty() || before(last, address)) last = address;
        values[address] = value;
    }

    void remove(const void * address) { values.erase(address); }

    const Value * find(const void * address) const {
        const std::less<const void *> before;
        if (values.empty() || before(address, first) || before(last, address)) return nullptr;
        const auto found = values.find(address);
        return found == values.end() ? nullptr : &found->second;
    }
};

// Names and beginnings of names. Most names that are looked up begin with another letter than all that are known.
class Names {
    std::unordered_set<std::string> whole;
    std::vector<std::string> prefixes;
    bool begin[256] = {};

  public:
    void add(const char * name, bool prefix) {
        begin[(unsigned char) name[0]] = true;
        if (prefix) prefixes.push_back(name);
        else whole.insert(name);
    }

    bool have(const char * name) const {
        if (!begin[(unsigned char) name[0]]) return false;
        for (const std::string & prefix : prefixes) {
            if (!strncmp(name, prefix.c_str(), prefix.size())) return true;
        }
        return !whole.empty() && whole.count(std::string(name, strnlen(name, NAME_BYTES)));
    }
};

struct Operation {
    int32_t number;
    int64_t least_rows;
};

// Indices of our own, in the place of those that were chosen.
struct Choice {
    const void * chosen = nullptr;
    void * indices = nullptr;
};

enum class Answer { ASK = -1, NO = 0, STOP = 1 };

struct Mark {
    Answer answer;
    bool of_copies;  // of watched tensors, too
    char name[NAME_BYTES];
};

void copy_name(char * to, const char * name) { memcpy(to, name, strnlen(name, NAME_BYTES - 1)); }

bool same_name(const char * one, const char * other) { return !strncmp(one, other, NAME_BYTES); }

// The tensors that devices have copies of, by the names that ggml's scheduler gives these: "<device>#<name>#<number>".
class Copies {
    std::unordered_map<std::string, const void *> originals;

  public:
    void add(const char * name, const void * original) { originals[name] = original; }

    const void * original(const Tensor * tensor) const {
        if (originals.empty()) return nullptr;
        const char * first = strchr(tensor->name, '#'), * last = strrchr(tensor->name, '#');
        if (first == last) return nullptr;
        const auto found = originals.find(std::string(first + 1, last));
        return found == originals.end() ? nullptr : found->second;
    }
};

// A tensor that is watched, and whether a node reads it from a copy.
struct Read {
    const void * tensor = nullptr;
    bool copied = false;
};

}  // namespace

struct edgespec_watch {
    Names names;
    std::vector<Operation> operations;
    bool numbers = false;
    long last_number = -1;

    ByAddress<int32_t> groups;
    Copies copies;
    int32_t current = -1;
    std::vector<std::vector<Mark>> marks;  // by the nodes' numbers
    std::vector<edgespec_reader> readers;
    bool pending = false;

    int32_t indexed_product = -1;
    ByAddress<int32_t> stacks;
    std::unordered_map<int32_t, Choice> choices;

    int32_t at = -1;
    const Tensor * before = nullptr;
    bool stops = false;  // after the node that was asked about last

    void begin() {
        last_number = -1;
        readers.clear();
        pending = stops = false;
        for (auto & choice : choices) choice.second.chosen = nullptr;
        at = -1;
        before = nullptr;
    }

    Answer answer(Tensor * node) {
        at++;
        const Answer found = find_answer(node);
        before = node;
        return found;
    }

  private:
    Answer find_answer(Tensor * node) {
        const Mark * mark = mark_of(node);
        const Read read = read_by(node);
        if (read.tensor) {
            edgespec_reader reader = {read.tensor, at, {}, {}};
            copy_name(reader.name, node->name);
            if (before) copy_name(reader.before, before->name);
            readers.push_back(reader);
            if (!mark || mark->answer == Answer::ASK || *groups.find(read.tensor) != current) return Answer::ASK;
            if (read.copied && !mark->of_copies) return Answer::ASK;
            pending = true;
        }
        if (mark && mark->answer == Answer::STOP) return Answer::STOP;
        if (node->op == indexed_product && !redirected(node)) return Answer::ASK;
        for (const Operation & wanted : operations) {
            if (node->op == wanted.number && node->src[0] && node->src[0]->ne[1] >= wanted.least_rows) {
                return Answer::ASK;
            }
        }
        if (names.have(node->name)) return Answer::STOP;
        return numbers && has_new_number(node) ? Answer::ASK : Answer::NO;
    }

    const Mark * mark_of(const Tensor * node) const {
        if ((size_t) at >= marks.size()) return nullptr;
        for (const Mark & mark : marks[at]) {
            if (same_name(mark.name, node->name)) return &mark;
        }
        return nullptr;
    }

    // The first that is not of the current group, or any.
    Read read_by(const Tensor * node) const {
        Read found;
        for (int i = 0; i <= SOURCES; i++) {
            const Tensor * source = i < SOURCES ? node->src[i] : node->view_src;
            if (!source) continue;
            const void * original = copies.original(source);
            const Read read = {original ? original : source, original != nullptr};
            const int32_t * group = groups.find(read.tensor);
            if (!group) continue;
            if (*group != current) return read;
            found = {read.tensor, read.copied || found.copied};
        }
        return found;
    }

    bool redirected(Tensor * node) {
        const int32_t * group = stacks.find(node->src[0]);
        if (!group) return true;
        const Choice & choice = choices[*group];
        const void * present = node->src[2];
        // llama.cpp may compute a graph again, with the indices that it was given the last time.
        if (!choice.chosen || (present != choice.chosen && present != choice.indices)) return false;
        node->src[2] = (Tensor *) choice.indices;
        return true;
    }

    bool has_new_number(const Tensor * node) {
        const char * dash = strrchr(node->name, '-');
        if (!dash || !dash[1] || strspn(dash + 1, "0123456789") != strlen(dash + 1)) return false;
        const long number = strtol(dash + 1, nullptr, 10);
        if (number == last_number) return false;
        last_number = number;
        return true;
    }
};

struct edgespec_gate {
    edgespec_handler handler;
    std::vector<edgespec_watch *> watches;
    bool failed = false;

    bool asked(Tensor * node) {
        bool stop = false;
        for (size_t i = 0; i < watches.size(); i++) {
            edgespec_watch & watch = *watches[i];
            const Answer answer = watch.answer(node);
            watch.stops = answer == Answer::STOP || (answer == Answer::ASK && call(node, (int) i, 1));
            stop = stop || watch.stops;
        }
        return stop || failed;
    }

    bool computed(Tensor * node) {
        for (edgespec_watch * watch : watches) watch->pending = false;
        for (size_t i = 0; i < watches.size(); i++) {
            if (watches[i]->stops) call(node, (int) i, 0);
        }
        return !failed;
    }

  private:
    bool call(Tensor * node, int watch, int ask) {
        if (failed) return false;
        const int result = handled(node, watch, ask);
        failed = result < 0;
        return result > 0;
    }

    // An exception of a device must not pass the interpreter that the handler runs in.
    int handled(Tensor * node, int watch, int ask) noexcept {
        const int entered = edgespec_guard_suspend();
        const int result = handler(node, watch, ask);
        edgespec_guard_resume(entered);
        return result;
    }
};

extern "C" {

edgespec_watch * edgespec_watch_new(void) { return new edgespec_watch; }
void edgespec_watch_free(edgespec_watch * watch) { delete watch; }

void edgespec_watch_name(edgespec_watch * watch, const char * name, int prefix) { watch->names.add(name, prefix != 0); }

void edgespec_watch_operation(edgespec_watch * watch, int32_t operation, int64_t least_rows) {
    watch->operations.push_back({operation, least_rows});
}

void edgespec_watch_numbers(edgespec_watch * watch) { watch->numbers = true; }

void edgespec_watch_tensor(edgespec_watch * watch, const void * tensor, int32_t group) {
    watch->groups.set(tensor, group);
}

void edgespec_watch_no_tensor(edgespec_watch * watch, const void * tensor) { watch->groups.remove(tensor); }

void edgespec_watch_copies(edgespec_watch * watch, const char * name, const void * tensor) {
    watch->copies.add(name, tensor);
}

void edgespec_watch_current(edgespec_watch * watch, int32_t group) { watch->current = group; }

void edgespec_watch_mark(edgespec_watch * watch, int32_t at, const char * name, int stop, int of_copies) {
    if ((size_t) at >= watch->marks.size()) watch->marks.resize(at + 1);
    auto & here = watch->marks[at];
    for (Mark & mark : here) {
        if (same_name(mark.name, name)) {
            mark.answer = (Answer) stop;
            mark.of_copies = of_copies != 0;
            return;
        }
    }
    here.push_back({(Answer) stop, of_copies != 0, {}});
    copy_name(here.back().name, name);
}

void edgespec_watch_unmark(edgespec_watch * watch) { watch->marks.clear(); }
int edgespec_watch_pending(const edgespec_watch * watch) { return watch->pending; }

const edgespec_reader * edgespec_watch_reader(const edgespec_watch * watch, int number) {
    return (size_t) number < watch->readers.size() ? &watch->readers[number] : nullptr;
}

int32_t edgespec_watch_at(const edgespec_watch * watch) { return watch->at; }

void edgespec_watch_redirect(edgespec_watch * watch, int32_t operation, const void * stack, int32_t group,
                             void * indices) {
    watch->indexed_product = operation;
    watch->stacks.set(stack, group);
    watch->choices[group].indices = indices;
}

void edgespec_watch_choice(edgespec_watch * watch, int32_t group, const void * chosen) {
    watch->choices[group].chosen = chosen;
}

edgespec_gate * edgespec_gate_new(edgespec_handler handler) { return new edgespec_gate{handler, {}}; }
void edgespec_gate_free(edgespec_gate * gate) { delete gate; }

void edgespec_gate_watches(edgespec_gate * gate, edgespec_watch * const * watches, int count) {
    gate->watches.assign(watches, watches + count);
}

void edgespec_gate_begin(edgespec_gate * gate) {
    gate->failed = false;
    for (edgespec_watch * watch : gate->watches) watch->begin();
}

int8_t edgespec_on_node(void * node, int8_t ask, void * gate) {
    auto * own = (edgespec_gate *) gate;
    if (own->failed) return ask;  // stop here, and go no further
    return ask ? own->asked((Tensor *) node) : own->computed((Tensor *) node);
}
}
