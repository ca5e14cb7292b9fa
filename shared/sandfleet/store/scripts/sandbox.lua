-- What is known of one sandbox.
-- KEYS  1 prefix
-- ARGV  1 sandbox
-- Returns nil or {sandbox, state, route, thread, user, backend, created, used, warm since or '', agents, ops, restored or ''}
--@use time route view
return view(A[1], now_ms())
