// gemrun.hpp: gemrun.h for C++17, with owners instead of pairs of calls, and errors thrown.
//
//     gemrun::Context model("model.gembin");
//     std::string answer = model.generate("The conveyor stops when");
//
// A Context owns the model and is moved, not copied. Errors of the engine become gemrun::Error with
// the engine's code and sentence. An exception that a callback throws ends the run and comes out of
// the call. Everything else is as gemrun.h says; get() is the C context for what is not wrapped.
#ifndef GEMRUN_HPP
#define GEMRUN_HPP

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "gemrun.h"

namespace gemrun {

class Error : public std::runtime_error {
public:
    Error(gemrun_status code, const std::string &text) : std::runtime_error(text), code_(code) {}
    gemrun_status code() const noexcept { return code_; }

private:
    gemrun_status code_;
};

// A result that is negative on failure, or an Error.
inline std::int64_t check(std::int64_t result)
{
    if (result < 0)
        throw Error(static_cast<gemrun_status>(result), gemrun_last_error());
    return result;
}

struct Message {
    gemrun_role role;
    std::string text;
};

// How to answer: the C request with its defaults, and a callback that may stop by returning false.
struct Request {
    gemrun_request settings;
    std::function<bool(std::string_view)> on_text;
};

class Context {
public:
    explicit Context(const std::string &path, const gemrun_config &config = gemrun_config_default())
    {
        gemrun_context_t *opened = nullptr;
        check(gemrun_open(&opened, path.c_str(), &config));
        context_.reset(opened);
    }
    // The caller's bytes, aligned to 4096, used in place; see gemrun_open_mem.
    Context(const void *image, std::size_t image_size, void *memory, std::size_t memory_size,
            const gemrun_config &config = gemrun_config_default())
    {
        gemrun_context_t *opened = nullptr;
        check(gemrun_open_mem(&opened, image, image_size, memory, memory_size, &config));
        context_.reset(opened);
    }

    gemrun_context_t *get() const noexcept { return context_.get(); }
    Request request() const { return {gemrun_request_default(get()), nullptr}; }

    std::string generate(const std::string &prompt) { return generate(prompt, request()); }
    std::string generate(const std::string &prompt, const Request &request)
    {
        return run(request, [&](const gemrun_request *q) {
            return gemrun_generate(get(), prompt.c_str(), q, nullptr);
        });
    }
    std::string chat(const std::vector<Message> &messages) { return chat(messages, request()); }
    std::string chat(const std::vector<Message> &messages, const Request &request)
    {
        std::vector<gemrun_message> plain;
        for (const Message &m : messages)
            plain.push_back({m.role, m.text.c_str()});
        return run(request, [&](const gemrun_request *q) {
            return gemrun_chat(get(), plain.data(), plain.size(), q, nullptr);
        });
    }
    void cancel() noexcept { gemrun_cancel(get()); } // from any thread

    std::vector<std::int32_t> tokenize(std::string_view text, std::uint32_t flags = 1)
    {
        std::vector<std::int32_t> ids(text.size() + 8); // an id takes a byte at least
        auto count = check(gemrun_tokenize(get(), text.data(), text.size(), flags, ids.data(),
                                           ids.size()));
        ids.resize(static_cast<std::size_t>(count));
        return ids;
    }
    std::string detokenize(const std::vector<std::int32_t> &ids, std::uint32_t flags = 0)
    {
        std::string text(1, '\0');
        auto size = check(gemrun_detokenize(get(), ids.data(), ids.size(), flags, text.data(), 1));
        text.resize(static_cast<std::size_t>(size) + 1);
        check(gemrun_detokenize(get(), ids.data(), ids.size(), flags, text.data(), text.size()));
        text.resize(static_cast<std::size_t>(size));
        return text;
    }

    void reset() { gemrun_reset_kv_cache(get()); }
    std::int32_t prefill(const std::vector<std::int32_t> &ids)
    {
        return static_cast<std::int32_t>(check(gemrun_prefill(get(), ids.data(), ids.size())));
    }
    std::int32_t decode(std::int32_t id)
    {
        return static_cast<std::int32_t>(check(gemrun_decode(get(), id)));
    }
    std::int32_t sample(const Request &request)
    {
        return static_cast<std::int32_t>(check(gemrun_sample(get(), &request.settings)));
    }
    // Stored test vectors that passed.
    std::int32_t run_tests() { return static_cast<std::int32_t>(check(gemrun_run_tests(get()))); }

    gemrun_stats stats() const
    {
        gemrun_stats found{};
        found.size = sizeof found;
        check(gemrun_get_stats(get(), &found));
        return found;
    }
    gemrun_info info() const
    {
        gemrun_info found{};
        found.size = sizeof found;
        check(gemrun_get_info(get(), &found));
        return found;
    }

private:
    struct Destroy {
        void operator()(gemrun_context_t *context) const noexcept { gemrun_destroy(context); }
    };
    struct Sink { // what a run's callback needs
        const Request &request;
        std::string text;
        std::exception_ptr thrown;
    };

    static int take(void *user, std::int32_t, const char *text, std::size_t size) noexcept
    {
        Sink &sink = *static_cast<Sink *>(user);
        try {
            sink.text.append(text, size);
            return sink.request.on_text && !sink.request.on_text({text, size});
        } catch (...) { // C code stands between
            sink.thrown = std::current_exception();
            return 1;
        }
    }
    template <typename Call> std::string run(const Request &request, Call call)
    {
        Sink sink{request, {}, nullptr};
        gemrun_request q = request.settings;
        q.on_text = take;
        q.user = &sink;
        std::int64_t result = call(&q);
        if (sink.thrown)
            std::rethrow_exception(sink.thrown);
        check(result);
        return std::move(sink.text);
    }

    std::unique_ptr<gemrun_context_t, Destroy> context_;
};

} // namespace gemrun
#endif
