-- Append a reply to a client's stream, if the client is still there (it alone makes the stream).
local function reply(client, op_id, payload)
  if client == '' then return false end
  return call('XADD', P .. 'reply:' .. client, 'NOMKSTREAM', 'MAXLEN', '~', 10000, '*', 'op', op_id, 'r', payload)
end

-- The wire error as text; `facts` is a JSON fragment without the braces or ''.
local function failure(code, message, facts)
  return '{"error":{"code":"' .. code .. '","message":' .. cjson.encode(message) .. ',"facts":{' .. facts .. '}}}'
end
